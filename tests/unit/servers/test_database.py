"""A served database that opens slowly, and one that stops on its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
import pytest
from tests.unit.servers.doubles import until

from penstock.clock import Clock
from penstock.errors import OutcomeUnknown, Unavailable
from penstock.metrics import Registry
from penstock.servers.database import Place, ServedDatabase
from penstock.servers.timeseries import TimeSeriesSettings
from penstock.servers.timeseries.routes import TimeSeriesApi, timeseries_app
from penstock.servers.vector import VectorSettings
from penstock.servers.vector.routes import VectorApi, vector_app
from penstock.testing import ManualClock


@dataclass
class Held:
    """A database that opens on request, and whose check raises a given error."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    opening_error: Exception | None = None
    check_errors: list[Exception] = field(default_factory=list)
    checks: int = 0
    closed: bool = False
    failed: Exception | None = None
    unstored: int = 0
    storage_wait_s: float = 0.0

    async def open(self) -> Held:
        await self.go.wait()
        if self.opening_error is not None:
            raise self.opening_error
        return self

    async def failure(self) -> Exception:
        await asyncio.Event().wait()
        raise AssertionError

    async def check(self) -> None:
        self.checks += 1
        if self.check_errors:
            raise self.check_errors.pop(0)

    async def close(self) -> None:
        self.closed = True


def timeseries(clock: Clock) -> object:
    settings = TimeSeriesSettings(port=0)
    return timeseries_app(TimeSeriesApi(settings, clock=clock, registry=Registry()), settings)


def vectors(clock: Clock) -> object:
    settings = VectorSettings(port=0)
    return vector_app(VectorApi(settings, clock=clock, registry=Registry()), settings)


@contextlib.asynccontextmanager
async def served(
    database: Held, clock: ManualClock, app: Callable[[Clock], object] = vectors
) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[None]]]:
    """Run the server; the test handles the error that it raises at the end."""
    bound: list[tuple[str, int]] = []
    server = ServedDatabase(
        app(clock),  # type: ignore[arg-type]
        Place(host="127.0.0.1", port=0),
        opening=database.open,
        opened=lambda database: None,
        draining=lambda: None,
        clock=clock,
    )
    stop = asyncio.Event()
    task = asyncio.create_task(server.serve(stop, on_bound=lambda *at: bound.append(at)))
    await until(lambda: bool(bound))
    try:
        async with httpx.AsyncClient(base_url=f"http://{bound[0][0]}:{bound[0][1]}") as client:
            yield client, task
    finally:
        stop.set()
        if not task.done():
            await task


@pytest.mark.parametrize("app", [timeseries, vectors])
async def test_a_server_reports_how_long_its_database_has_been_opening(
    app: Callable[[Clock], object], caplog: pytest.LogCaptureFixture
) -> None:
    database, clock = Held(), ManualClock()
    with caplog.at_level(logging.WARNING, "penstock.servers.database"):
        async with served(database, clock, app) as (client, _):
            await clock.advance(25)
            answer = await client.get("/-/ready")
            assert answer.status_code == 503
            assert "is being opened, for 25 s now" in answer.text
            assert [one.getMessage().partition(":")[0] for one in caplog.records] == [
                "the database is not open after 10 s",
                "the database is not open after 20 s",
            ]
            database.go.set()
            await clock.advance(60)
            assert len(caplog.records) == 2
    assert database.closed


async def test_a_stalled_storage_is_logged_once_until_it_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    database, clock = Held(), ManualClock()
    database.go.set()
    with caplog.at_level(logging.WARNING, "penstock.servers.database"):
        async with served(database, clock):
            for storage_wait_s in (19.0, 25.0, 30.0, 0.0, 21.0):
                database.storage_wait_s = storage_wait_s
                await clock.advance(2)
    assert [one.getMessage() for one in caplog.records] == [
        "no write succeeds: the storage has not responded for 25 s",
        "no write succeeds: the storage has not responded for 21 s",
    ]


async def test_a_database_that_does_not_open_ends_the_server_with_its_error() -> None:
    database = Held(opening_error=Unavailable("s3://bucket: not within 60 s"))
    async with served(database, ManualClock()) as (_, task):
        database.go.set()
        with pytest.raises(Unavailable, match="s3://bucket"):
            await task


async def test_a_stopped_database_ends_the_server_and_an_unavailable_one_does_not() -> None:
    database, clock = Held(), ManualClock()
    database.go.set()
    database.check_errors = [Unavailable("away"), Unavailable("away"), OutcomeUnknown("stopped for good")]
    async with served(database, clock) as (_, task):
        await clock.advance(5)
        assert database.checks == 2
        assert not task.done()
        await clock.advance(2)
        with pytest.raises(OutcomeUnknown, match="stopped for good"):
            await task
    assert database.closed
