"""Reading a checkpoint that Spark wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import Corrupt, Unsupported
from penstock.spark.pipeline.checkpoint import Checkpoint, parse_offsets

OFFSETS = 'v1\n{"batchWatermarkMs":0,"conf":{}}\n{"0": 17, "after": {"0": "ingest/a.batch"}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "commits").mkdir()
    (tmp_path / "metadata").write_text('{"id":"e7a1"}')
    for batch in (0, 1):
        (tmp_path / "offsets" / str(batch)).write_text(OFFSETS)
        (tmp_path / "offsets" / f".{batch}.crc").write_text("x")
    (tmp_path / "commits" / "0").write_text('v1\n{"nextBatchWatermarkMs":0}')
    return tmp_path


@pytest.mark.parametrize("prefix", ["", "file://"], ids=["path", "url"])
def test_a_checkpoint_gives_its_query_and_its_batches(folder: Path, prefix: str) -> None:
    checkpoint = Checkpoint(f"{prefix}{folder}")
    assert checkpoint.query_id == "e7a1"
    assert (checkpoint.planned(), checkpoint.done()) == ([0, 1], [0])
    assert checkpoint.offset(1) == {"0": 17, "after": {"0": "ingest/a.batch"}}
    assert checkpoint.offset(2) is None


def test_a_checkpoint_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path / "none"))
    assert (checkpoint.query_id, checkpoint.planned(), checkpoint.offset(0)) == (None, [], None)


@pytest.mark.parametrize("text", ["", "v2\n{}\n{}", "v1\n{}", "v1\n{}\nnonsense", "v1\n{}\n[1]"])
def test_a_file_that_is_not_an_offset_file_is_refused(text: str) -> None:
    with pytest.raises(Corrupt):
        parse_offsets(text, "offsets/0")


def test_a_source_without_an_offset_is_distinguished() -> None:
    assert parse_offsets("v1\n{}\n-", "offsets/0") == [None]


def test_damage_is_reported_with_the_file(folder: Path) -> None:
    (folder / "metadata").write_text("{")
    with pytest.raises(Corrupt, match="metadata"):
        _ = Checkpoint(str(folder)).query_id
    (folder / "offsets" / "0").write_text(f"{OFFSETS}\n{{}}")
    with pytest.raises(Corrupt, match="2 sources"):
        Checkpoint(str(folder)).offset(0)


def test_a_checkpoint_elsewhere_needs_a_session() -> None:
    with pytest.raises(Unsupported, match="Spark session"):
        _ = Checkpoint("hdfs://namenode/checkpoint").query_id
