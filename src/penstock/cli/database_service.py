"""What the commands that serve a database share: options, the queue, and what people are told."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import click
import msgspec

from penstock.buffer import ConsumerConfig
from penstock.cli.display import Progress
from penstock.errors import PenstockError
from penstock.units import format_count

if TYPE_CHECKING:
    from penstock.metrics import Registry
    from penstock.services import FedDatabase, Feed, FeedConfig, FeedReport

__all__ = [
    "DatabaseService",
    "address",
    "listening_options",
    "queue_config",
    "queue_options",
    "start_logging",
]

_LOG = logging.getLogger(__name__)
D = TypeVar("D")
D_co = TypeVar("D_co", covariant=True)
C = TypeVar("C", bound=Callable[..., object])


def listening_options(port: int) -> Callable[[C], C]:
    """Where a server listens, and whom it lets in."""
    return _together(
        click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen."),
        click.option("--port", type=int, default=port, show_default=True, help="0 takes a free one."),
        click.option("--port-file", metavar="PATH", help="Where to write host:port once it listens."),
        click.option("--allow-no-keys", is_flag=True, help="Let other machines in without a key."),
        click.option(
            "--allow-host",
            multiple=True,
            metavar="NAME",
            help="Without keys: a further name of this server, and of pages that may use it; * for any.",
        ),
        click.option(
            "--json", "as_json", is_flag=True, help="Tell what happens as lines of JSON on standard output."
        ),
    )


def queue_options(what: str) -> Callable[[C], C]:
    """The queue that feeds the database with `what`."""
    return _together(
        click.option("--buffer", "queue", metavar="STORE", help=f"Also take {what} from the queue there."),
        click.option("--manifest", metavar="PATH", help="The queue's manifest [default: ingest/manifest]."),
        click.option(
            "--poll-interval", default="1s", show_default=True, help="How often an empty queue is looked at."
        ),
        click.option(
            "--adopt-queue",
            type=click.Choice(["moved", "new"]),
            help="Take another queue than before: the same one moved here, or a new one from its beginning.",
        ),
        click.option(
            "--on-bad-batch",
            type=click.Choice(["raise", "skip"]),
            default="raise",
            show_default=True,
            help="End at a batch that is damaged or missing, or keep it as a dead letter and go on.",
        ),
    )


def _together(*options: Callable[[C], C]) -> Callable[[C], C]:
    def decorate(command: C) -> C:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def address(store: str) -> str:
    """A directory as a URL; a URL as it is."""
    return store if "://" in store else f"file://{os.path.abspath(store)}"


def queue_config(
    queue: str | None, manifest: str | None, poll_interval: str, adopt_queue: str | None, on_bad_batch: str
) -> FeedConfig | None:
    """What the options say of the queue; None without one. Raises `ConfigError`."""
    from penstock.services import FeedConfig

    if queue is None:
        return None
    # A queue that is shorter than what was read of it is another one: going on would pass over its records.
    consumer = ConsumerConfig(store=address(queue), prefetch=1, strict_resume=True, on_bad_batch=on_bad_batch)
    if manifest is not None:
        consumer = replace(consumer, manifest_path=manifest)
    return FeedConfig(queue=consumer, poll_interval=poll_interval, adopt_queue=adopt_queue)


def start_logging() -> None:
    """To standard error, where supervisors look for it."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


class _Serve(Protocol[D_co]):
    """The server of a database, until the event is set."""

    def __call__(
        self,
        stop: asyncio.Event,
        *,
        source: Callable[[D_co, Registry], Feed] | None,
        on_bound: Callable[[str, int], None],
        on_ready: Callable[[D_co], None],
    ) -> Coroutine[None, None, None]: ...


class DatabaseService(Generic[D]):
    """A server and its feed, and what people are told of them."""

    def __init__(
        self,
        serve: _Serve[D],
        *,
        fed: Callable[[D, Registry], FedDatabase],
        about: Callable[[D], tuple[str, dict[str, object]]],
        queue: FeedConfig | None,
        as_json: bool,
    ) -> None:
        """`fed` makes a database that can be fed of one that was opened; `about` says what is in it, for
        people and for programs."""
        self._serve = serve
        self._fed_database = fed
        self._about = about
        self._queue = queue
        self._as_json = as_json
        self._progress = Progress()
        self._feed: Feed | None = None

    def run(self) -> None:
        """Until a signal, or what stops it, which is raised."""
        from penstock.http import run
        from penstock.servers import shorten_slice

        shorten_slice()  # SlateDB's threads compute while they store, and writers are not to wait for them
        with self._progress:
            try:
                run(self._main)
            except PenstockError as error:
                self._tell("stopped", error=str(error), **self._fed())
                raise
            self._tell("stopped", error=None, **self._fed())

    def _main(self, stop: asyncio.Event) -> Coroutine[None, None, None]:
        source = None if self._queue is None else self._make_feed
        return self._serve(stop, source=source, on_bound=self._bound, on_ready=self._ready)

    def _make_feed(self, database: D, registry: Registry) -> Feed:
        from penstock.services import Feed

        assert self._queue is not None
        self._feed = Feed(
            self._queue, self._fed_database(database, registry), registry=registry, on_progress=self._show
        )
        return self._feed

    def _bound(self, host: str, port: int) -> None:
        name = f"[{host}]" if ":" in host else host
        _LOG.info("listening on http://%s:%d", name, port)
        self._tell("listening", host=host, port=port)

    def _ready(self, database: D) -> None:
        words, figures = self._about(database)
        _LOG.info("%s", words)
        self._tell("ready", **figures)

    def _show(self, report: FeedReport) -> None:
        aside = report.refused + report.stored_in_part
        self._progress.show(
            f"fed {format_count(report.records)} records, {format_count(aside)} set aside, "
            f"up to batch {report.through if report.through is not None else '-'}"
            f"{', caught up' if report.caught_up else ''}"
        )

    def _fed(self) -> dict[str, object]:
        if self._feed is None:
            return {}
        report = self._feed.report
        return {
            "records": report.records,
            "refused": report.refused,
            "stored_in_part": report.stored_in_part,
            "through": report.through,
        }

    def _tell(self, event: str, **more: object) -> None:
        if self._as_json:
            click.echo(msgspec.json.encode({"event": event, **more}).decode())
