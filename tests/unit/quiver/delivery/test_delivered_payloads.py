"""No payload stays readable in the directory after every subscriber has processed it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from tests.unit.quiver.engine_doubles import StepClock

from penstock.metrics import Registry
from penstock.quiver.engine import Quiver

MARKER = b"delivered-payload-51f0c2"


def files_with_marker(path: Path) -> list[str]:
    return [str(file) for file in path.rglob("*") if file.is_file() and MARKER in file.read_bytes()]


def deliver(path: Path, clock: StepClock, *, threads: bool) -> Quiver:
    quiver = Quiver.open(str(path), clock=clock, registry=Registry(), maintenance=False, threads=threads)
    quiver.register("lake")
    quiver.activate("lake")
    for _ in range(20):
        quiver.ingest(pa.record_batch({"text": [MARKER.decode()] * 5}), slot=50)
    quiver.flush()
    assert files_with_marker(path)
    while (bundle := quiver.next_bundle("lake")) is not None:
        bundle.ack()
    return quiver


def test_maintenance_leaves_no_delivered_payload_once_everything_is_acknowledged(tmp_path: Path) -> None:
    clock = StepClock()
    quiver = deliver(tmp_path, clock, threads=False)
    clock.step(1)
    quiver.maintain()
    assert files_with_marker(tmp_path) == []
    quiver.close()


def test_a_clean_shutdown_leaves_no_delivered_payload_and_no_file_made_ahead(tmp_path: Path) -> None:
    deliver(tmp_path, StepClock(), threads=True).close()
    assert files_with_marker(tmp_path) == []
    assert list(tmp_path.rglob("next-*")) == []
