"""Acknowledgements written by earlier versions stay readable. Golden files are only added to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.unit.quiver.ack_doubles import CORE, Core, segment

from penstock.quiver.model import BundleRef
from penstock.quiver.offsets.records import Outcome
from penstock.quiver.offsets.state import SubscriberState
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.quiver.tools.offline import read_history
from penstock.storage.fs import OsFileSystem

GOLDEN = Path(__file__).parents[3] / "golden" / "quiver" / "acks"
INFOS = [segment(seq, bundles=3) for seq in (2, 3, 5)]


def make() -> Core:
    """Create the state of the golden files: two checkpoints, and a log after the second."""
    core = Core().open()
    core.subscribe("otlp", "parquet_exporter-with_a_name_of_three_pieces_1234567890")
    for seq in (1, 2, 3):
        core.add(seq, bundles=3)
    for name in core.offsets.names():
        core.deliveries.ack_segment(name, 1)
    assert core.remove() == [1]
    core.offsets.checkpoint(next_segment_seq=4, next_wal_seq=40)
    core.ack("otlp", 3, 1)
    core.offsets.checkpoint(next_segment_seq=4, next_wal_seq=41)
    core.add(5, bundles=3)
    core.offsets.resolve("otlp", BundleRef(2, 0), Outcome.NACK, attempt=1)
    core.offsets.resolve("otlp", BundleRef(2, 0), Outcome.REJECTED, attempt=2)
    core.deliveries.ack_segment("otlp", 5)
    core.offsets.deactivate("otlp")
    core.offsets.sync()
    return core


def files_of(core: Core) -> dict[str, bytes]:
    names = [name for name, _ in core.disk.list_files(CORE) if not name.endswith("reserve")]
    return {name: core.disk.read(f"{CORE}/{name}") for name in names}


def golden_files() -> dict[str, bytes]:
    paths = [path for path in sorted(GOLDEN.rglob("*")) if path.is_file()]
    return {str(path.relative_to(GOLDEN)): path.read_bytes() for path in paths}


def test_the_first_format_is_written_byte_for_byte() -> None:
    assert files_of(make()) == golden_files()


@pytest.mark.parametrize("lost", ["", "meta/checkpoint"])
def test_the_first_format_is_read(tmp_path: Path, lost: str) -> None:
    shutil.copytree(GOLDEN, tmp_path / "core_0")
    if lost:
        (tmp_path / "core_0" / lost).unlink()
    offsets = SubscriptionStore(OsFileSystem(), str(tmp_path / "core_0"))
    assert offsets.reconcile(INFOS).missing == ()
    assert offsets.damage == ()
    otlp = offsets.subscriber("otlp")
    assert (otlp.state, otlp.hwm, otlp.acked, otlp.nacked, otlp.rejected) == (
        SubscriberState.INACTIVE,
        1,
        7,
        1,
        1,
    )
    assert offsets.state.entry("otlp").progress.is_resolved(BundleRef(3, 1))
    assert not offsets.state.entry("otlp").progress.is_resolved(BundleRef(3, 0))
    assert offsets.subscriber("parquet_exporter-with_a_name_of_three_pieces_1234567890").pending_segments == 3
    assert offsets.state.next_segment_seq == 6
    assert offsets.state.next_wal_seq == (40 if lost else 41)
    offsets.close()


def test_the_log_is_printed_as_text() -> None:
    events = list(read_history(OsFileSystem(), str(GOLDEN)))
    assert [(event.what, event.subscriber, event.segment_seq, event.bundle) for event in events[-5:]] == [
        ("never_written", None, 4, None),
        ("nack", "otlp", 2, 0),
        ("rejected", "otlp", 2, 0),
        ("ack", "otlp", 5, None),
        ("inactive", "otlp", 0, None),
    ]
