"""`penstock quiver inspect` and `export` on a data directory created here."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from tests.unit.quiver.bundles import batch, sealed_of

from penstock.cli.failure import ExitCode
from penstock.cli.main import cli
from penstock.errors import InvalidInput, NotFound
from penstock.quiver.segments.store import SegmentStore
from penstock.storage.fs import OsFileSystem

pytestmark = pytest.mark.unit


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for core_id in (0, 1):
        core = tmp_path / "data" / f"core_{core_id}"
        store = SegmentStore.open(
            OsFileSystem(), str(core / "segments"), str(core / "quarantine"), core_id=core_id
        )
        store.write(sealed_of(batch(1, 2), batch(3), first_seq=1), 1)
        if core_id == 0:
            store.write(sealed_of(batch(4), first_seq=100), 2)
    return tmp_path / "data"


def quiver(*arguments: object) -> Result:
    words = ["quiver", *(str(each) for each in arguments)]
    return CliRunner().invoke(cli, words, standalone_mode=False, catch_exceptions=False)


def damage(path: Path) -> None:
    path.chmod(0o640)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_inspect_lists_the_segments_of_all_cores(data: Path) -> None:
    done = quiver("inspect", data)
    assert done.return_value == ExitCode.OK
    assert "3 segments, 7 items" in done.output


def test_inspect_prints_everything_as_json(data: Path) -> None:
    told = json.loads(quiver("inspect", data, "--json", "--core", 0).output)
    assert [(each["core_id"], each["seq"], each["item_count"]) for each in told["segments"]] == [
        (0, 1, 3),
        (0, 2, 1),
    ]
    assert told["damaged"] == {}


def test_inspect_selects_by_time(data: Path) -> None:
    told = json.loads(quiver("inspect", data, "--json", "--since", "1970-01-01T00:01:00Z").output)
    assert [each["seq"] for each in told["segments"]] == [2]
    assert "0 segments" in quiver("inspect", data, "--signal", "logs").output
    with pytest.raises(InvalidInput, match="--until"):
        quiver("inspect", data, "--until", "tomorrow")


def test_inspect_shows_one_segment_with_columns_and_bundles(data: Path) -> None:
    shown = quiver("inspect", data, "--segment", 2).output
    assert "segment 2 of core 0" in shown
    assert "int64" in shown
    told = json.loads(quiver("inspect", data, "--segment", 1, "--core", 1, "--json").output)
    assert [each["items"] for each in told["bundles"]] == [2, 1]
    assert told["columns"][0] == {"name": "n", "type": "int64"}


def test_inspect_requires_a_core_and_reports_missing_segments(data: Path) -> None:
    with pytest.raises(InvalidInput, match="--core"):
        quiver("inspect", data, "--segment", 1)
    with pytest.raises(NotFound, match="no segment 9"):
        quiver("inspect", data, "--segment", 9)
    with pytest.raises(NotFound, match="core_0"):
        quiver("inspect", data / "nowhere")


def test_inspect_exits_with_5_when_a_checksum_is_wrong(data: Path) -> None:
    damage(data / "core_0" / "segments" / "seg-0000000000000001.arrow")
    assert quiver("inspect", data).return_value == ExitCode.OK
    done = quiver("inspect", data, "--verify")
    assert done.return_value == ExitCode.CORRUPT
    assert "segment 1 of core 0" in done.output


def test_inspect_exits_with_5_when_a_sidecar_is_damaged(data: Path) -> None:
    damage(data / "core_1" / "segments" / "seg-0000000000000001.meta.json")
    done = quiver("inspect", data)
    assert done.return_value == ExitCode.CORRUPT
    assert "core_1/segments/seg-0000000000000001.meta.json" in done.output


def test_export_writes_parquet_and_can_be_repeated(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "3 files, 7 rows" in quiver("export", data, "--parquet", out).output
    assert pq.read_table(out / "other" / "core-0-seg-0000000000000002.parquet")["n"].to_pylist() == [4]
    again = quiver("export", data, "--parquet", out)
    assert "0 files" in again.output
    assert "3 existed already" in again.output


def test_export_prints_its_result_as_json(data: Path, tmp_path: Path) -> None:
    told = json.loads(quiver("export", data, "--parquet", tmp_path / "out", "--core", 1, "--json").output)
    assert (told["files"], told["rows"], told["damaged"]) == (1, 3, [])
