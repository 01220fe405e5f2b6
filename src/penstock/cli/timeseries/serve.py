"""`penstock timeseries serve`: the database of time series in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING

import click
import msgspec

from penstock.buffer import ConsumerConfig
from penstock.cli.display import Progress
from penstock.cli.failure import ExitCode
from penstock.config import load_mapping
from penstock.errors import PenstockError, Unsupported
from penstock.units import format_count

if TYPE_CHECKING:
    from penstock.metrics import Registry
    from penstock.server.timeseries import TimeSeriesSettings
    from penstock.services import Feed, FeedReport
    from penstock.timeseries import TimeSeries, TimeSeriesConfig

__all__ = ["serve"]

_LOG = logging.getLogger(__name__)

_ENVIRONMENT = """\b
Environment:
  TIMESERIES_API_KEYS   key[:scopes],… with the scopes read, write and admin

SIGTERM or Ctrl-C ends it with exit code 0, after everything it took is durable. A process that is fenced
by a newer one ends with exit code 4.
"""


@click.command(epilog=_ENVIRONMENT)
@click.argument("store")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=int, default=9090, show_default=True, help="0 takes a free one.")
@click.option("--port-file", metavar="PATH", help="Where to write host:port once it listens.")
@click.option("--buffer", "queue", metavar="STORE", help="Also take OTLP metrics from the queue there.")
@click.option("--manifest", metavar="PATH", help="The queue's manifest [default: ingest/manifest].")
@click.option(
    "--poll-interval", default="1s", show_default=True, help="How often an empty queue is looked at."
)
@click.option("--retention", metavar="DURATION", help="How long samples are kept [default: for ever].")
@click.option("--flush-interval", metavar="DURATION", help="How often writes are stored [default: 1s].")
@click.option(
    "--acknowledge",
    type=click.Choice(["durable", "applied"]),
    default="durable",
    show_default=True,
    help="When a write over HTTP is answered.",
)
@click.option("--config", metavar="FILE", help="YAML with more settings of the database.")
@click.option("--allow-no-keys", is_flag=True, help="Let other machines in without a key.")
@click.option(
    "--json", "as_json", is_flag=True, help="Tell what happens as lines of JSON on standard output."
)
def serve(
    store: str,
    host: str,
    port: int,
    port_file: str | None,
    queue: str | None,
    manifest: str | None,
    poll_interval: str,
    retention: str | None,
    flush_interval: str | None,
    acknowledge: str,
    config: str | None,
    allow_no_keys: bool,
    as_json: bool,
) -> int:
    """Serve the time series in STORE: PromQL for readers, remote write and OTLP for writers.

    STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…. Starting it fences whoever served
    the same database before.
    """
    try:
        from penstock.server.auth import Keyring
        from penstock.server.timeseries import Acknowledge, TimeSeriesSettings
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise Unsupported(
            f"the server needs the package {package}: pip install 'penstock[databases,timeseries,topics]'"
        ) from error
    settings = TimeSeriesSettings(
        host=host,
        port=port,
        port_file=port_file,
        keys=Keyring.parse(os.environ.get("TIMESERIES_API_KEYS", ""), "TIMESERIES_API_KEYS"),
        allow_no_keys=allow_no_keys,
        acknowledge=Acknowledge(acknowledge),
    )
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    database = _database(config, retention, flush_interval)
    consumer = _consumer(queue, manifest)
    with Progress() as progress:
        _Service(store, settings, database, consumer, poll_interval, progress, as_json=as_json).run()
    return ExitCode.OK


def _database(path: str | None, retention: str | None, flush_interval: str | None) -> TimeSeriesConfig:
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


def _consumer(queue: str | None, manifest: str | None) -> ConsumerConfig | None:
    if queue is None:
        return None
    address = queue if "://" in queue else f"file://{os.path.abspath(queue)}"
    # A queue that is shorter than what was read of it is another one: going on would pass over its records.
    if manifest is None:
        return ConsumerConfig(store=address, prefetch=1, strict_resume=True)
    return ConsumerConfig(store=address, manifest_path=manifest, prefetch=1, strict_resume=True)


class _Service:
    """The server and its feed, and what people are told of them."""

    def __init__(
        self,
        store: str,
        settings: TimeSeriesSettings,
        database: TimeSeriesConfig,
        queue: ConsumerConfig | None,
        poll_interval: str,
        progress: Progress,
        *,
        as_json: bool,
    ) -> None:
        self._store = store
        self._settings = settings
        self._database = database
        self._queue = queue
        self._poll_interval = poll_interval
        self._progress = progress
        self._as_json = as_json
        self._feed: Feed | None = None

    def run(self) -> None:
        """Until a signal, or what stops it."""
        from penstock.server import process

        try:
            process.run(self._main)
        except PenstockError as error:
            self._tell("stopped", error=str(error), **self._fed())
            raise
        self._tell("stopped", error=None, **self._fed())

    async def _main(self, stop: asyncio.Event) -> None:
        from penstock.server.timeseries import serve as serve_database

        await serve_database(
            self._store,
            self._settings,
            stop,
            config=self._database,
            source=None if self._queue is None else self._make_feed,
            on_bound=self._bound,
            on_ready=self._ready,
        )

    def _make_feed(self, database: TimeSeries, registry: Registry) -> Feed:
        from penstock.services import Feed, FeedConfig
        from penstock.services.timeseries_feed import FedTimeSeries

        assert self._queue is not None
        self._feed = Feed(
            FeedConfig(queue=self._queue, poll_interval=self._poll_interval),
            FedTimeSeries(database, registry=registry),
            registry=registry,
            on_progress=self._show,
        )
        return self._feed

    def _bound(self, host: str, port: int) -> None:
        name = f"[{host}]" if ":" in host else host
        _LOG.info("listening on http://%s:%d", name, port)
        self._tell("listening", host=host, port=port)

    def _ready(self, database: TimeSeries) -> None:
        _LOG.info("ready, with %d hours of samples", len(database.buckets))
        self._tell("ready", buckets=len(database.buckets))

    def _show(self, report: FeedReport) -> None:
        self._progress.show(
            f"fed {format_count(report.records)} records, {format_count(report.refused)} set aside, "
            f"up to batch {report.through if report.through is not None else '-'}"
            f"{', caught up' if report.caught_up else ''}"
        )

    def _fed(self) -> dict[str, object]:
        if self._feed is None:
            return {}
        report = self._feed.report
        return {"records": report.records, "refused": report.refused, "through": report.through}

    def _tell(self, event: str, **more: object) -> None:
        if self._as_json:
            click.echo(msgspec.json.encode({"event": event, **more}).decode())
