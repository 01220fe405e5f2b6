"""Offline tools on the directory of a real engine whose old records are in the cold tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.unit.topics.data_directories import FS
from tests.unit.topics.engine_doubles import FSYNC, read_all, recs

from penstock.errors import Rejected
from penstock.findings import Severity
from penstock.topics import Engine, EngineConfig, Predicate
from penstock.topics.segments.store import open_cold_store
from penstock.topics.tools.backup import backup
from penstock.topics.tools.restore import restore
from penstock.topics.tools.verify import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A data directory, its cold tier, and its live records."""

    data: Path
    cold: str
    records: dict[int, object]


def config(data: Path, cold: str | None = None) -> EngineConfig:
    return EngineConfig(
        data_dir=str(data), cold_dir=cold, wal_shards=2, segment_max_events=5, hot_retain_segments=1
    )


async def records_of(data: Path, cold: str | None = None) -> dict[int, object]:
    async with await Engine.open(config(data, cold)) as engine:
        return await read_all(engine, "t")


@pytest.fixture(params=["directory", "store"])
async def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    data, place = tmp_path / "data", tmp_path / "cold"
    place.mkdir()
    cold = str(place) if request.param == "directory" else place.as_uri()
    async with await Engine.open(config(data, cold)) as engine:
        await engine.put_topic("t", FSYNC)
        for n in range(40):
            await engine.write("t", recs(n, tag="odd" if n % 2 else "even"))
            if n % 5 == 4:
                await engine.checkpoint()
        await engine.checkpoint()
        # The cold copies of the sidecars lack this.
        assert (await engine.delete("t", match=Predicate(value="odd"))).deleted == 20
        await engine.checkpoint()
        await engine.write("t", recs("new"))
        records = await read_all(engine, "t")
    hot = {path.stem for path in data.glob("topics/*/*.data")}
    indexed = {path.stem for path in data.glob("topics/*/*.idx")}
    assert len(indexed - hot) >= 4
    assert len(list(data.glob("topics/*/*.del"))) >= 4
    return Made(data=data, cold=cold, records=records)


def test_a_directory_with_cold_segments_is_clean(made: Made) -> None:
    report = verify(FS, str(made.data), cold=open_cold_store(made.cold, FS))
    assert report.findings == []
    assert report.stored_records >= 40


def test_without_the_cold_tier_the_unchecked_records_are_reported(made: Made) -> None:
    report = verify(FS, str(made.data))
    assert report.problems == []
    assert {finding.severity for finding in report.findings} == {Severity.NOTE}
    assert "5 records of t not checked: they are in the cold tier; give --cold" in {
        finding.text for finding in report.findings
    }


def test_damage_in_the_cold_tier_is_found(made: Made) -> None:
    place = made.cold.removeprefix("file://")
    first = min(Path(place).rglob("*.data"))
    raw = bytearray(first.read_bytes())
    raw[30] ^= 1
    first.write_bytes(raw)
    (finding,) = verify(FS, str(made.data), cold=open_cold_store(made.cold, FS)).problems
    assert (finding.topic, finding.first_seq, finding.last_seq) == ("t", 1, 1)
    first.unlink()
    (finding,) = verify(FS, str(made.data), cold=open_cold_store(made.cold, FS)).problems
    assert finding.text == "the file is missing in the cold tier"


async def test_a_backup_contains_the_cold_records_and_every_deletion(made: Made, tmp_path: Path) -> None:
    target, again = tmp_path / "backup", tmp_path / "again"
    with pytest.raises(Rejected, match="t has records in the cold tier"):
        backup(FS, str(made.data), str(target))
    backup(FS, str(made.data), str(target), cold=open_cold_store(made.cold, FS))
    assert verify(FS, str(target)).findings == []
    restore(FS, str(target), str(again))
    assert len(made.records) == 21
    assert await records_of(again) == made.records == await records_of(made.data, made.cold)
