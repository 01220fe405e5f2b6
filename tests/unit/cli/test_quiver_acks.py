"""`penstock quiver acks`, `subscribers` and `fsck` on a data directory that a real engine wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import cli
from penstock.errors import NotFound
from penstock.quiver.config import QuiverConfig
from penstock.quiver.engine import Quiver
from penstock.quiver.errors import Locked, UnknownSubscriber

CONFIG = {"retention": {"steady_state_headroom": "1GB", "min_free": 0}}


def open_quiver(path: Path) -> Quiver:
    return Quiver.open(str(path), QuiverConfig.from_mapping(CONFIG), maintenance=False)


def write(quiver: Quiver, *values: int) -> None:
    for value in values:
        quiver.ingest(pa.record_batch({"n": [value]}), signal="logs")
    quiver.flush()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create two segments of two bundles; one subscriber acked three of them, the other rejected one."""
    path = tmp_path / "data"
    with open_quiver(path) as quiver:
        for name in ("parquet", "otlp"):
            quiver.register(name)
            quiver.activate(name)
        write(quiver, 1, 2)
        write(quiver, 3, 4)
        for _ in range(3):
            bundle = quiver.next_bundle("parquet")
            assert bundle is not None
            bundle.ack()
        refused = quiver.next_bundle("otlp")
        assert refused is not None
        refused.reject("malformed")
    return path


def quiver(*arguments: object) -> Result:
    words = ["quiver", *(str(each) for each in arguments)]
    return CliRunner().invoke(cli, words, standalone_mode=False)


def test_acks_prints_one_line_per_record(data: Path) -> None:
    done = quiver("acks", data)
    lines = done.output.splitlines()
    assert [line.split("  ", 1)[1] for line in lines if "segment=" in line] == [
        "segment=seg-1  bundle=0  subscriber=parquet  ack",
        "segment=seg-1  bundle=1  subscriber=parquet  ack",
        "segment=seg-2  bundle=0  subscriber=parquet  ack",
        "segment=seg-1  bundle=0  subscriber=otlp  rejected",
    ]
    assert all(line.startswith("ts=20") for line in lines)


def test_acks_can_be_filtered(data: Path) -> None:
    told = json.loads(quiver("acks", data, "--subscriber", "parquet", "--segment", 1, "--json").output)
    assert [(each["bundle"], each["what"], each["attempt"]) for each in told] == [
        (0, "ack", 1),
        (1, "ack", 1),
    ]
    assert len(quiver("acks", data, "--last", 1).output.splitlines()) == 1


def test_subscribers_are_listed_with_their_backlog(data: Path) -> None:
    told = json.loads(quiver("subscribers", data, "--json").output)["subscribers"]
    assert [(each["name"], each["state"], each["hwm"], each["pending_segments"]) for each in told] == [
        ("otlp", "active", 0, 2),
        ("parquet", "active", 1, 1),
    ]
    assert "rejected" not in quiver("subscribers", data).output
    assert "parquet" in quiver("subscribers", data).output


def test_listing_may_run_next_to_the_writer_but_dropping_may_not(data: Path) -> None:
    with open_quiver(data):
        assert quiver("subscribers", data).exception is None
        assert quiver("acks", data).exception is None
        assert quiver("fsck", data).return_value == 0
        assert isinstance(quiver("subscribers", data, "--drop", "otlp").exception, Locked)
        assert isinstance(quiver("fsck", data, "--repair").exception, Locked)


def test_a_dropped_subscriber_is_removed_and_releases_its_data(data: Path) -> None:
    assert "2 segments pending" in quiver("subscribers", data, "--drop", "otlp").output
    assert isinstance(quiver("subscribers", data, "--drop", "otlp").exception, UnknownSubscriber)
    with open_quiver(data) as opened:
        assert [each.name for each in opened.subscribers()] == ["parquet"]


def test_a_sound_directory_is_clean(data: Path) -> None:
    done = quiver("fsck", data)
    assert done.return_value == 0
    assert done.output.startswith("clean: 2 segments, 4 items")


def flip(path: Path, place: int) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def test_damage_is_found_and_repaired_with_the_evidence_kept(data: Path) -> None:
    core = data / "core_0"
    flip(next(iter(sorted((core / "segments").glob("*.arrow")))), 300)
    flip(core / "meta" / "checkpoint", 60)
    done = quiver("fsck", data)
    assert done.return_value == 5
    assert "problem" in done.output
    before = {path: path.read_bytes() for path in core.rglob("*") if path.is_file()}
    assert quiver("fsck", data).return_value == 5
    assert {path: path.read_bytes() for path in core.rglob("*") if path.is_file()} == before, "it only looks"
    mended = quiver("fsck", data, "--repair", "--json")
    told = json.loads(mended.output)
    assert mended.return_value == 0, mended.output
    assert told["clean"]
    assert told["repaired"]
    names = {path.name for path in (core / "quarantine").iterdir()}
    assert any(name.endswith(".arrow") for name in names)
    assert any(name.startswith("checkpoint-") for name in names)
    with open_quiver(data) as opened:
        assert opened.next_bundle("otlp") is not None


def test_a_second_repair_changes_nothing(data: Path) -> None:
    assert json.loads(quiver("fsck", data, "--repair", "--json").output)["repaired"] == []


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    for command in ("acks", "subscribers", "fsck"):
        assert isinstance(quiver(command, tmp_path).exception, NotFound)
        assert isinstance(quiver(command, tmp_path / "nowhere").exception, NotFound)
