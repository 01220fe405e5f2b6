"""The sources of a fleet, with files that are invalid at first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.cli.starting_file import pipeline_text
from penstock.cli.up import find_file
from penstock.console.sources import Sources
from penstock.errors import ConfigError
from penstock.testing import ManualClock
from penstock.up import Fleet, prepare, run_command


def sources_of(directory: Path) -> Sources:
    (directory / "penstock.yaml").write_text("data_dir: kept\npipelines: [{file: events.yaml}]\n")
    prepared, faults = prepare(find_file(None, [], None, {}, directory))
    assert faults == []
    assert prepared is not None
    clock = ManualClock()
    return Sources(Fleet(prepared.plan, (), clock=clock), clock)


async def test_a_pipeline_whose_file_is_wrong_keeps_its_place_until_it_is_corrected(tmp_path: Path) -> None:
    (tmp_path / "events.yaml").write_text("nonsense: true\n")
    sources = sources_of(tmp_path)
    (place,) = sources.refresh().pipelines
    assert (place.name, place.part, place.queue) == ("events", "pipeline-events", None)
    books = sources.pipeline("events").books
    for _ in range(2):
        with pytest.raises(ConfigError, match="nonsense: unknown key"):
            await asyncio.to_thread(books.read, 1)
    (tmp_path / "events.yaml").write_text(pipeline_text())
    reading = await asyncio.to_thread(books.read, 1)
    assert (reading.query, reading.checkpoint) == (None, str(tmp_path / "kept" / "checkpoints" / "events"))
    assert await asyncio.to_thread(books.find, 0, 0) is None
    assert await asyncio.to_thread(books.letters, None, 1) is not None
    assert sources.refresh().pipelines == (place,)
    assert sources.pipeline("events").books is books
    await sources.close()


async def test_books_that_were_never_opened_can_be_closed(tmp_path: Path) -> None:
    sources = sources_of(tmp_path)
    sources.refresh()
    await sources.close()


async def test_a_command_about_a_pipeline_finds_the_data_where_the_fleet_has_it(tmp_path: Path) -> None:
    (tmp_path / "events.yaml").write_text(pipeline_text())
    told: list[str] = []
    arguments = ["redrive", "--json", "--", str(tmp_path / "events.yaml")]
    async with asyncio.timeout(60):
        outcome = await run_command(arguments, told.append, sources_of(tmp_path).environment)
    assert outcome.exit_code != 127
    assert "PENSTOCK_DATA_DIR" not in outcome.errors
