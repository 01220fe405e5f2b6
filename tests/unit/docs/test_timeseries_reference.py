"""The reference page of the time series server names every path, setting, metric and option there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click

from penstock.cli.databases import timeseries_serve as serve
from penstock.clock import SYSTEM_CLOCK
from penstock.metrics import Registry
from penstock.servers.timeseries import TimeSeriesSettings
from penstock.servers.timeseries.routes import TimeSeriesApi, timeseries_app
from penstock.timeseries import TimeSeriesConfig

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
PAGE = (REFERENCE / "timeseries-server.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_words(text: str) -> set[str]:
    """What stands in backticks in the first cell of each row."""
    cells = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def test_every_path_is_documented_with_its_methods() -> None:
    settings = TimeSeriesSettings()
    api = TimeSeriesApi(settings, clock=SYSTEM_CLOCK, registry=Registry())
    app = timeseries_app(api, settings)
    table = PAGE.split("\n\n| status |", 1)[0]
    told = {
        path: row
        for row in table.splitlines()
        for path in re.findall(r"`(/[^`]+)`", row.split("|")[1:2][0] if "|" in row else "")
    }
    assert len(told) == 14
    for path, row in told.items():
        match = app._router.match(path.replace("{name}", "job").encode())
        assert match is not None, path
        methods = {method.decode() for method in match.methods}
        assert methods == set(row.split("|")[2].strip().split(", ")), path


def test_settings_are_documented() -> None:
    for kind in (TimeSeriesConfig, TimeSeriesSettings):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert first_words(section(PAGE, kind.__name__)) == fields


def test_options_of_the_command_are_documented() -> None:
    text = section((REFERENCE / "cli.md").read_text(encoding="utf-8"), "`penstock timeseries serve`")
    told = {option for cell in first_words(text) for option in re.findall(r"--[a-z-]+", cell)}
    options = {name for one in serve.params if isinstance(one, click.Option) for name in one.opts}
    assert told == {name for name in options if name.startswith("--")}


async def test_metrics_are_documented() -> None:
    from tests.unit.timeseries.database_doubles import config, disk

    from penstock.buffer import ConsumerConfig
    from penstock.objects import MemoryStore
    from penstock.services import Feed, FeedConfig
    from penstock.services.timeseries_feed import FedTimeSeries
    from penstock.timeseries import TimeSeries

    registry = Registry()
    TimeSeriesApi(TimeSeriesSettings(), clock=SYSTEM_CLOCK, registry=registry)
    async with await TimeSeries.open(disk().open(), config(), registry=registry) as database:
        queue = FeedConfig(queue=ConsumerConfig(store=MemoryStore("told")))
        Feed(queue, FedTimeSeries(database, registry=registry), registry=registry)
    told = first_words(section((REFERENCE / "metrics.md").read_text(encoding="utf-8"), "Time series"))
    names = {name for name in registry.snapshot() if name.startswith(("timeseries.", "feed."))}
    assert told == {name for name in names if "write_coordinator" not in name}
