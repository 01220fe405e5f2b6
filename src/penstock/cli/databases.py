"""`penstock timeseries serve` and `penstock vector serve`: run a database in the foreground."""

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

from penstock.buffer import ConsumerConfig
from penstock.cli.base import (
    EVENTS_HELP,
    Command,
    Decorator,
    Output,
    command,
    given_values,
    injected,
)
from penstock.cli.failure import needs
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
S = TypeVar("S")
D_co = TypeVar("D_co", covariant=True)
_TIMESERIES_ENVIRONMENT = """\b
Environment:
  TIMESERIES_API_KEYS   key[:scopes],… with the scopes read, write and admin

SIGTERM or Ctrl-C ends it with exit code 0 once every accepted write is durable, or with 6 if the store does
not accept the writes in time. If a newer process takes over, it ends with exit code 4.
"""
_VECTOR_ENVIRONMENT = """\b
Environment:
  VECTOR_API_KEYS   key[:scopes],… with the scopes read, write, delete and admin

SIGTERM or Ctrl-C ends it with exit code 0 once every accepted write is durable, or with 6 if the store does
not accept the writes in time. If a newer process takes over, it ends with exit code 4.
"""


def address(store: str) -> str:
    """Return the address of a store: a URL unchanged, a directory as a file URL."""
    return store if "://" in store else f"file://{os.path.abspath(store)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The options of a database's server: where it listens, who may connect, when a write is acknowledged."""

    host: str
    port: int
    port_file: str | None
    allow_no_keys: bool
    allow_host: tuple[str, ...]
    acknowledge: str
    acknowledge_timeout: str

    def settings(self, kind: Callable[..., S], keys_variable: str, **more: object) -> S:
        """Build a server's settings, with the keys in the environment. Raise `ConfigError` if invalid."""
        from penstock.http import Keyring

        return kind(
            host=self.host,
            port=self.port,
            port_file=self.port_file,
            keys=Keyring.parse(os.environ.get(keys_variable, ""), keys_variable),
            allow_no_keys=self.allow_no_keys,
            allowed_hosts=self.allow_host,
            **{"acknowledge": self.acknowledge, "acknowledge_timeout": self.acknowledge_timeout, **more},
        )


def serve_command(
    *, port: int, levels: Sequence[str], records: str, epilog: str
) -> Callable[[Command], click.Command]:
    """Turn a function into the command of a database server; it receives `serving`, `feeding` and `out`.

    `levels` are the choices of --acknowledge; `records` names the records that the database reads from a
    queue.
    """

    def decorate(function: Command) -> click.Command:
        function = _feeding_options(records)(_serving_options(port, levels)(function))
        return command("serve", json_help=EVENTS_HELP, epilog=epilog)(function)

    return decorate


def _serving_options(port: int, levels: Sequence[str]) -> Decorator:
    return injected(
        "serving",
        Serving,
        click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on."),
        click.option("--port", type=int, default=port, show_default=True, help="0 takes a free port."),
        click.option("--port-file", metavar="PATH", help="The file to write host:port to once it listens."),
        click.option("--allow-no-keys", is_flag=True, help="Let other machines connect without a key."),
        click.option(
            "--allow-host",
            multiple=True,
            metavar="NAME",
            help="Without keys: another host name of this server or of pages that may use it; * for any.",
        ),
        click.option(
            "--acknowledge",
            type=click.Choice(list(levels)),
            default="durable",
            show_default=True,
            help="When a write over HTTP is acknowledged.",
        ),
        click.option(
            "--acknowledge-timeout",
            default="30s",
            show_default=True,
            help="How long to wait for the store before a writer is asked to retry.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """The options of the queue that feeds a database."""

    queue: str | None
    manifest: str | None
    poll_interval: str
    adopt_queue: str | None
    on_bad_batch: str

    def config(self) -> FeedConfig | None:
        """Return the configuration of the feed, or None without a queue. Raise `ConfigError` if invalid."""
        from penstock.services import FeedConfig

        if self.queue is None:
            return None
        # A queue shorter than the stored position is a different queue: continuing would skip its records.
        consumer = ConsumerConfig(
            store=address(self.queue), prefetch=1, strict_resume=True, on_bad_batch=self.on_bad_batch
        )
        if self.manifest is not None:
            consumer = replace(consumer, manifest_path=self.manifest)
        return FeedConfig(queue=consumer, poll_interval=self.poll_interval, adopt_queue=self.adopt_queue)


def _feeding_options(records: str) -> Decorator:
    return injected(
        "feeding",
        Feeding,
        click.option("--buffer", "queue", metavar="STORE", help=f"Also read {records} from this queue."),
        click.option("--manifest", metavar="PATH", help="The queue's manifest [default: ingest/manifest]."),
        click.option(
            "--poll-interval", default="1s", show_default=True, help="How often to poll an empty queue."
        ),
        click.option(
            "--adopt-queue",
            type=click.Choice(["moved", "new"]),
            help="Accept a different queue: the same one at a new place, or a new one from its beginning.",
        ),
        click.option(
            "--on-bad-batch",
            type=click.Choice(["raise", "skip"]),
            default="raise",
            show_default=True,
            help="At a damaged or missing batch: stop, or store a dead letter and continue.",
        ),
    )


def start_logging() -> None:
    """Log to standard error."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


class _Serve(Protocol[D_co]):
    """Serves a database until the event is set."""

    def __call__(
        self,
        stop: asyncio.Event,
        *,
        source: Callable[[D_co, Registry], Feed] | None,
        on_bound: Callable[[str, int], None],
        on_ready: Callable[[D_co], None],
    ) -> Coroutine[None, None, None]: ...


class DatabaseService(Generic[D]):
    """A database server and its feed, with their events and log."""

    def __init__(
        self,
        serve: _Serve[D],
        *,
        fed: Callable[[D, Registry], FedDatabase],
        about: Callable[[D], tuple[str, dict[str, object]]],
        queue: FeedConfig | None,
        out: Output,
    ) -> None:
        """`fed` wraps an open database for the feed; `about` describes its contents as text and as JSON."""
        self._serve = serve
        self._fed_database = fed
        self._about = about
        self._queue = queue
        self._out = out
        self._progress = Progress()
        self._feed: Feed | None = None

    def run(self) -> None:
        """Serve until a signal. Raise the error that stops the server."""
        from penstock.http import run
        from penstock.servers import shorten_slice

        shorten_slice()  # SlateDB's threads are busy while they store, and must not delay writers
        with self._progress:
            try:
                run(self._main)
            except PenstockError as error:
                self._out.event("stopped", error=str(error), **self._fed())
                raise
            self._out.event("stopped", error=None, **self._fed())

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
        self._out.event("listening", host=host, port=port)

    def _ready(self, database: D) -> None:
        text, figures = self._about(database)
        _LOG.info("%s", text)
        self._out.event("ready", **figures)

    def _show(self, report: FeedReport) -> None:
        refused = report.refused + report.stored_in_part
        self._progress.show(
            f"fed {format_count(report.records)} records, {format_count(refused)} refused, "
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


@serve_command(
    port=9090, levels=("durable", "applied"), records="OTLP metrics", epilog=_TIMESERIES_ENVIRONMENT
)
@click.argument("store")
@click.option("--retention", metavar="DURATION", help="How long samples are kept [default: indefinitely].")
@click.option("--flush-interval", metavar="DURATION", help="How often writes are stored [default: 1s].")
@click.option("--config", metavar="FILE", help="YAML with more settings of the database.")
def timeseries_serve(
    store: str,
    retention: str | None,
    flush_interval: str | None,
    config: str | None,
    serving: Serving,
    feeding: Feeding,
    out: Output,
) -> None:
    """Serve the time series in STORE: PromQL for readers, remote write and OTLP for writers.

    STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…. Only one process can serve a
    database: a new one fences the previous one.
    """
    with needs("the server", extras="databases,timeseries,topics"):
        from penstock.servers import Acknowledge, TimeSeriesSettings, serve_timeseries
    settings = serving.settings(
        TimeSeriesSettings, "TIMESERIES_API_KEYS", acknowledge=Acknowledge(serving.acknowledge)
    )
    start_logging()
    DatabaseService(
        partial(
            serve_timeseries, store, settings, config=_timeseries_config(config, retention, flush_interval)
        ),
        fed=_fed_timeseries,
        about=_about_timeseries,
        queue=feeding.config(),
        out=out,
    ).run()


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


@serve_command(
    port=8080, levels=("durable", "flushed", "applied"), records="vectors", epilog=_VECTOR_ENVIRONMENT
)
@click.argument("store")
@click.option("--name", metavar="NAME", help="The collection below STORE [default: vectors].")
@click.option("--dimensions", type=int, help="Required to create the collection.")
@click.option(
    "--metric", type=click.Choice(["l2", "cosine", "dot"]), help="The distance of vectors [default: l2]."
)
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME:TYPE[:indexed]",
    help="A field of the schema: string, int64, float64, bool or text. May be repeated.",
)
@click.option("--flush-interval", metavar="DURATION", help="How often writes are stored [default: 5s].")
@click.option("--config", metavar="FILE", help="YAML with more settings of the collection.")
def vector_serve(
    store: str,
    name: str | None,
    dimensions: int | None,
    metric: str | None,
    fields: Sequence[str],
    flush_interval: str | None,
    config: str | None,
    serving: Serving,
    feeding: Feeding,
    out: Output,
) -> None:
    """Serve the collection of vectors in STORE: upserts, deletions and searches as JSON over HTTP.

    STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…. Only one process can serve a
    collection: a new one fences the previous one. The options must match an existing collection.
    """
    with needs("the server", extras="databases,vector,topics"):
        from penstock.servers import VectorSettings, serve_vector
    settings = serving.settings(VectorSettings, "VECTOR_API_KEYS")
    start_logging()
    flags: dict[str, Setting] = {
        "store": address(store),
        "name": name,
        "dimensions": dimensions,
        "metric": metric,
        "fields": [_field(text) for text in fields] or None,
        "flush_interval": flush_interval,
    }
    DatabaseService(
        partial(serve_vector, _vector_config(config, given_values(flags)), settings),
        fed=_fed_vectors,
        about=_about_vectors,
        queue=feeding.config(),
        out=out,
    ).run()


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
    text = f"{len(store)} vectors of {dimensions} dimensions"
    return text, {"vectors": len(store), "dimensions": dimensions}
