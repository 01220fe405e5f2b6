"""`penstock timeseries serve` and `penstock vector serve`: the databases in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import click
import msgspec

from penstock.buffer import ConsumerConfig
from penstock.cli.failure import ExitCode, needs
from penstock.cli.options import Decorator, injected
from penstock.cli.output import Progress
from penstock.config import Setting, load_mapping, merge
from penstock.errors import ConfigError, PenstockError
from penstock.units import format_count

if TYPE_CHECKING:
    from penstock.metrics import Registry
    from penstock.services import FedDatabase, Feed, FeedConfig, FeedReport
    from penstock.timeseries import TimeSeries, TimeSeriesConfig
    from penstock.vector import VectorConfig, VectorStore


_LOG = logging.getLogger(__name__)
D = TypeVar("D")
D_co = TypeVar("D_co", covariant=True)


def address(store: str) -> str:
    """Return a directory as a URL, and a URL as it is."""
    return store if "://" in store else f"file://{os.path.abspath(store)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a server listens, and whom it lets in."""

    host: str
    port: int
    port_file: str | None
    allow_no_keys: bool
    allow_host: tuple[str, ...]


def listening_options(port: int) -> Decorator:
    """Hand the command of a server `listening`, and `as_json`; `port` is the one it takes unless told."""
    return injected(
        "listening",
        Listening,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """The queue that feeds a database."""

    queue: str | None
    manifest: str | None
    poll_interval: str
    adopt_queue: str | None
    on_bad_batch: str

    def config(self) -> FeedConfig | None:
        """Return what the options say of the queue; None without one. Raises `ConfigError`."""
        from penstock.services import FeedConfig

        if self.queue is None:
            return None
        # A queue that is shorter than what was read of it is another one: to go on would skip its records.
        consumer = ConsumerConfig(
            store=address(self.queue), prefetch=1, strict_resume=True, on_bad_batch=self.on_bad_batch
        )
        if self.manifest is not None:
            consumer = replace(consumer, manifest_path=self.manifest)
        return FeedConfig(queue=consumer, poll_interval=self.poll_interval, adopt_queue=self.adopt_queue)


def feeding_options(what: str) -> Decorator:
    """Hand the command of a database `feeding`: the queue with `what`."""
    return injected(
        "feeding",
        Feeding,
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


def start_logging() -> None:
    """Log to standard error, where supervisors look for it."""
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
    """A server and its feed, and what is printed about them."""

    def __init__(
        self,
        serve: _Serve[D],
        *,
        fed: Callable[[D, Registry], FedDatabase],
        about: Callable[[D], tuple[str, dict[str, object]]],
        queue: FeedConfig | None,
        as_json: bool,
    ) -> None:
        """`fed` makes an open database one that can be fed; `about` says what is in it, in words and JSON."""
        self._serve = serve
        self._fed_database = fed
        self._about = about
        self._queue = queue
        self._as_json = as_json
        self._progress = Progress()
        self._feed: Feed | None = None

    def run(self) -> None:
        """Serve until a signal, or until an error stops it, which is raised."""
        from penstock.http import run
        from penstock.servers import shorten_slice

        shorten_slice()  # SlateDB's threads compute while they store, and writers are not to wait for them
        with self._progress:
            try:
                run(self._main)
            except PenstockError as error:
                self._print_event("stopped", error=str(error), **self._fed())
                raise
            self._print_event("stopped", error=None, **self._fed())

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
        self._print_event("listening", host=host, port=port)

    def _ready(self, database: D) -> None:
        words, figures = self._about(database)
        _LOG.info("%s", words)
        self._print_event("ready", **figures)

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

    def _print_event(self, event: str, **more: object) -> None:
        if self._as_json:
            click.echo(msgspec.json.encode({"event": event, **more}).decode())


_TIMESERIES_ENVIRONMENT = """\b
Environment:
  TIMESERIES_API_KEYS   key[:scopes],… with the scopes read, write and admin

SIGTERM or Ctrl-C ends it with exit code 0, after everything it took is durable; with 6 if the store does not
take it in time. A process that is fenced by a newer one ends with exit code 4.
"""


@click.command("serve", epilog=_TIMESERIES_ENVIRONMENT)
@click.argument("store")
@listening_options(9090)
@feeding_options("OTLP metrics")
@click.option("--retention", metavar="DURATION", help="How long samples are kept [default: for ever].")
@click.option("--flush-interval", metavar="DURATION", help="How often writes are stored [default: 1s].")
@click.option(
    "--acknowledge",
    type=click.Choice(["durable", "applied"]),
    default="durable",
    show_default=True,
    help="When a write over HTTP is answered.",
)
@click.option(
    "--acknowledge-timeout",
    default="30s",
    show_default=True,
    help="After this long without a word of the store a writer is told to send again.",
)
@click.option("--config", metavar="FILE", help="YAML with more settings of the database.")
def timeseries_serve(
    store: str,
    listening: Listening,
    feeding: Feeding,
    retention: str | None,
    flush_interval: str | None,
    acknowledge: str,
    acknowledge_timeout: str,
    config: str | None,
    as_json: bool,
) -> int:
    """Serve the time series in STORE: PromQL for readers, remote write and OTLP for writers.

    STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…. Starting it fences whoever served
    the same database before.
    """
    with needs("the server", extras="databases,timeseries,topics"):
        from penstock.http import Keyring
        from penstock.servers import Acknowledge, TimeSeriesSettings, serve_timeseries
    settings = TimeSeriesSettings(
        host=listening.host,
        port=listening.port,
        port_file=listening.port_file,
        keys=Keyring.parse(os.environ.get("TIMESERIES_API_KEYS", ""), "TIMESERIES_API_KEYS"),
        allow_no_keys=listening.allow_no_keys,
        allowed_hosts=listening.allow_host,
        acknowledge=Acknowledge(acknowledge),
        acknowledge_timeout=acknowledge_timeout,
    )
    start_logging()
    DatabaseService(
        partial(
            serve_timeseries, store, settings, config=_timeseries_config(config, retention, flush_interval)
        ),
        fed=_fed_timeseries,
        about=_about_timeseries,
        queue=feeding.config(),
        as_json=as_json,
    ).run()
    return ExitCode.OK


def _timeseries_config(
    path: str | None, retention: str | None, flush_interval: str | None
) -> TimeSeriesConfig:
    from penstock.timeseries import TimeSeriesConfig

    settings = load_mapping(path) if path is not None else {}
    if retention is not None:
        settings["retention"] = retention
    if flush_interval is not None:
        nested = settings.get("coordinator")
        settings["coordinator"] = {
            **(nested if isinstance(nested, dict) else {}),
            "flush_interval": flush_interval,
        }
    return TimeSeriesConfig.from_mapping(settings, where=path or "the command line")


def _fed_timeseries(database: TimeSeries, registry: Registry) -> FedDatabase:
    from penstock.services import FedTimeSeries

    return FedTimeSeries(database, registry=registry)


def _about_timeseries(database: TimeSeries) -> tuple[str, dict[str, object]]:
    hours = len(database.buckets)
    return f"ready, with {hours} hours of samples", {"buckets": hours}


_VECTOR_ENVIRONMENT = """\b
Environment:
  VECTOR_API_KEYS   key[:scopes],… with the scopes read, write, delete and admin

SIGTERM or Ctrl-C ends it with exit code 0, after everything it took is durable; with 6 if the store does not
take it in time. A process that is fenced by a newer one ends with exit code 4.
"""


@click.command("serve", epilog=_VECTOR_ENVIRONMENT)
@click.argument("store")
@click.option("--name", metavar="NAME", help="The collection below STORE [default: vectors].")
@click.option("--dimensions", type=int, help="Needed once, to create the collection.")
@click.option(
    "--metric", type=click.Choice(["l2", "cosine", "dot"]), help="How near vectors are [default: l2]."
)
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME:TYPE[:indexed]",
    help="A field of the schema: string, int64, float64, bool or text. May be repeated.",
)
@listening_options(8080)
@feeding_options("vectors")
@click.option("--flush-interval", metavar="DURATION", help="How often writes are stored [default: 5s].")
@click.option(
    "--acknowledge",
    type=click.Choice(["durable", "flushed", "applied"]),
    default="durable",
    show_default=True,
    help="When a write over HTTP is answered.",
)
@click.option(
    "--acknowledge-timeout",
    default="30s",
    show_default=True,
    help="After this long without a word of the store a writer is told to send again.",
)
@click.option("--config", metavar="FILE", help="YAML with more settings of the collection.")
def vector_serve(
    store: str,
    name: str | None,
    dimensions: int | None,
    metric: str | None,
    fields: Sequence[str],
    listening: Listening,
    feeding: Feeding,
    flush_interval: str | None,
    acknowledge: str,
    acknowledge_timeout: str,
    config: str | None,
    as_json: bool,
) -> int:
    """Serve the collection of vectors in STORE: upserts, deletions and searches as JSON over HTTP.

    STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…. Starting it fences whoever served
    the same collection before. What is said about an existing collection has to be true.
    """
    with needs("the server", extras="databases,vector,topics"):
        from penstock.http import Keyring
        from penstock.servers import VectorSettings, serve_vector
    settings = VectorSettings(
        host=listening.host,
        port=listening.port,
        port_file=listening.port_file,
        keys=Keyring.parse(os.environ.get("VECTOR_API_KEYS", ""), "VECTOR_API_KEYS"),
        allow_no_keys=listening.allow_no_keys,
        allowed_hosts=listening.allow_host,
        acknowledge=acknowledge,
        acknowledge_timeout=acknowledge_timeout,
    )
    start_logging()
    flags: dict[str, Setting] = {
        "store": address(store),
        "name": name,
        "dimensions": dimensions,
        "metric": metric,
        "fields": [_field(text) for text in fields] or None,
        "flush_interval": flush_interval,
    }
    collection = _vector_config(config, {key: value for key, value in flags.items() if value is not None})
    DatabaseService(
        partial(serve_vector, collection, settings),
        fed=_fed_vectors,
        about=_about_vectors,
        queue=feeding.config(),
        as_json=as_json,
    ).run()
    return ExitCode.OK


def _vector_config(path: str | None, flags: dict[str, Setting]) -> VectorConfig:
    from penstock.vector import VectorConfig

    layer = load_mapping(path) if path is not None else {}
    return VectorConfig.from_mapping(merge(layer, flags), where=path or "the command line")


def _field(text: str) -> dict[str, Setting]:
    parts = text.rsplit(":", 2) if text.endswith(":indexed") else text.rsplit(":", 1)
    if len(parts) < 2 or not parts[0]:
        raise ConfigError(f"--field {text!r}: write NAME:TYPE, or NAME:TYPE:indexed")
    return {"name": parts[0], "type": parts[1], "indexed": len(parts) == 3}


def _fed_vectors(store: VectorStore, registry: Registry) -> FedDatabase:
    from penstock.services import FedVectors

    return FedVectors(store)


def _about_vectors(store: VectorStore) -> tuple[str, dict[str, object]]:
    dimensions = store.collection.dimensions
    words = f"{len(store)} vectors of {dimensions} dimensions"
    return words, {"vectors": len(store), "dimensions": dimensions}
