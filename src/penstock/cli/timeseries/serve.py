"""`penstock timeseries serve`: the database of time series in the foreground."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import click

from penstock.cli.database_service import (
    DatabaseService,
    listening_options,
    queue_config,
    queue_options,
    start_logging,
)
from penstock.cli.failure import ExitCode
from penstock.config import load_mapping
from penstock.errors import Unsupported

if TYPE_CHECKING:
    from penstock.metrics import Registry
    from penstock.services import FedDatabase
    from penstock.timeseries import TimeSeries, TimeSeriesConfig

__all__ = ["serve"]

_ENVIRONMENT = """\b
Environment:
  TIMESERIES_API_KEYS   key[:scopes],… with the scopes read, write and admin

SIGTERM or Ctrl-C ends it with exit code 0, after everything it took is durable; with 6 if the store does not
take it in time. A process that is fenced by a newer one ends with exit code 4.
"""


@click.command(epilog=_ENVIRONMENT)
@click.argument("store")
@listening_options(9090)
@queue_options("OTLP metrics")
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
def serve(
    store: str,
    host: str,
    port: int,
    port_file: str | None,
    queue: str | None,
    manifest: str | None,
    poll_interval: str,
    adopt_queue: str | None,
    on_bad_batch: str,
    retention: str | None,
    flush_interval: str | None,
    acknowledge: str,
    acknowledge_timeout: str,
    config: str | None,
    allow_no_keys: bool,
    allow_host: tuple[str, ...],
    as_json: bool,
) -> int:
    """Serve the time series in STORE: PromQL for readers, remote write and OTLP for writers.

    STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…. Starting it fences whoever served
    the same database before.
    """
    try:
        from penstock.http import Keyring
        from penstock.servers import Acknowledge, TimeSeriesSettings, serve_timeseries
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
        allowed_hosts=allow_host,
        acknowledge=Acknowledge(acknowledge),
        acknowledge_timeout=acknowledge_timeout,
    )
    start_logging()
    DatabaseService(
        partial(serve_timeseries, store, settings, config=_database(config, retention, flush_interval)),
        fed=_fed,
        about=_about,
        queue=queue_config(queue, manifest, poll_interval, adopt_queue, on_bad_batch),
        as_json=as_json,
    ).run()
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


def _fed(database: TimeSeries, registry: Registry) -> FedDatabase:
    from penstock.services import FedTimeSeries

    return FedTimeSeries(database, registry=registry)


def _about(database: TimeSeries) -> tuple[str, dict[str, object]]:
    hours = len(database.buckets)
    return f"ready, with {hours} hours of samples", {"buckets": hours}
