"""The fleet as the console sees it, with files that are wrong at first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.cli.starting_file import pipeline_text
from penstock.cli.up import find_file
from penstock.console.fleet_host import FleetHost
from penstock.errors import ConfigError
from penstock.testing import ManualClock
from penstock.up import Fleet, prepare


def host_of(directory: Path) -> FleetHost:
    (directory / "penstock.yaml").write_text("data_dir: kept\npipelines: [{file: events.yaml}]\n")
    prepared, faults = prepare(find_file(None, [], None, {}, directory))
    assert faults == []
    assert prepared is not None
    return FleetHost(Fleet(prepared.plan, (), clock=ManualClock()))


def test_a_pipeline_whose_file_is_wrong_keeps_its_place_until_it_is_corrected(tmp_path: Path) -> None:
    (tmp_path / "events.yaml").write_text("nonsense: true\n")
    host = host_of(tmp_path)
    (place,) = host.plan().pipelines
    assert (place.name, place.part, place.queue) == ("events", "pipeline-events", None)
    for _ in range(2):
        with pytest.raises(ConfigError, match="nonsense: unknown key"):
            place.books.read(1)
    (tmp_path / "events.yaml").write_text(pipeline_text())
    reading = place.books.read(1)
    assert (reading.query, reading.checkpoint) == (None, str(tmp_path / "kept" / "checkpoints" / "events"))
    assert place.books.find(0, 0) is None
    assert place.books.letters(None, 1) is not None
    assert host.plan().pipelines == (place,)
    host.close()


def test_books_that_were_never_opened_can_be_closed(tmp_path: Path) -> None:
    host_of(tmp_path).close()


async def test_a_command_about_a_pipeline_finds_the_data_where_the_fleet_has_it(tmp_path: Path) -> None:
    (tmp_path / "events.yaml").write_text(pipeline_text())
    told: list[str] = []
    command = host_of(tmp_path).run(["redrive", "--json", "--", str(tmp_path / "events.yaml")], told.append)
    async with asyncio.timeout(60):
        outcome = await command
    assert outcome.exit_code != 127
    assert "PENSTOCK_DATA_DIR" not in outcome.errors
