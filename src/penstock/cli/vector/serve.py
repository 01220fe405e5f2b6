"""`penstock vector serve`: the vector database in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from penstock.buffer import ConsumerConfig
from penstock.cli.display import Progress
from penstock.cli.failure import ExitCode
from penstock.config import Setting, load_mapping, merge
from penstock.errors import ConfigError, PenstockError, Unsupported
from penstock.units import format_count

if TYPE_CHECKING:
    from penstock.metrics import Registry
    from penstock.server.vector import VectorSettings
    from penstock.services.feeding import Feed, FeedReport
    from penstock.vector import VectorConfig, VectorStore

__all__ = ["serve"]

_LOG = logging.getLogger(__name__)

_ENVIRONMENT = """\b
Environment:
  VECTOR_API_KEYS   key[:scopes],… with the scopes read, write, delete and admin

SIGTERM or Ctrl-C ends it with exit code 0, after everything it took is durable. A process that is fenced
by a newer one ends with exit code 4.
"""


@click.command(epilog=_ENVIRONMENT)
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
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=int, default=8080, show_default=True, help="0 takes a free one.")
@click.option("--port-file", metavar="PATH", help="Where to write host:port once it listens.")
@click.option("--buffer", "queue", metavar="STORE", help="Also take vectors from the queue there.")
@click.option("--manifest", metavar="PATH", help="The queue's manifest [default: ingest/manifest].")
@click.option(
    "--poll-interval", default="1s", show_default=True, help="How often an empty queue is looked at."
)
@click.option("--flush-interval", metavar="DURATION", help="How often writes are stored [default: 5s].")
@click.option(
    "--acknowledge",
    type=click.Choice(["durable", "flushed", "applied"]),
    default="durable",
    show_default=True,
    help="When a write over HTTP is answered.",
)
@click.option("--config", metavar="FILE", help="YAML with more settings of the collection.")
@click.option("--allow-no-keys", is_flag=True, help="Let other machines in without a key.")
@click.option(
    "--json", "as_json", is_flag=True, help="Tell what happens as lines of JSON on standard output."
)
def serve(
    store: str,
    name: str | None,
    dimensions: int | None,
    metric: str | None,
    fields: Sequence[str],
    host: str,
    port: int,
    port_file: str | None,
    queue: str | None,
    manifest: str | None,
    poll_interval: str,
    flush_interval: str | None,
    acknowledge: str,
    config: str | None,
    allow_no_keys: bool,
    as_json: bool,
) -> int:
    """Serve the collection of vectors in STORE: upserts, deletions and searches as JSON over HTTP.

    STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…. Starting it fences whoever served
    the same collection before. What is said about an existing collection has to be true.
    """
    try:
        from penstock.server.auth import Keyring
        from penstock.server.vector import VectorSettings
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise Unsupported(
            f"the server needs the package {package}: pip install 'penstock[databases,vector,topics]'"
        ) from error
    settings = VectorSettings(
        host=host,
        port=port,
        port_file=port_file,
        keys=Keyring.parse(os.environ.get("VECTOR_API_KEYS", ""), "VECTOR_API_KEYS"),
        allow_no_keys=allow_no_keys,
        acknowledge=acknowledge,
    )
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    flags: dict[str, Setting] = {
        "store": _address(store),
        "name": name,
        "dimensions": dimensions,
        "metric": metric,
        "fields": [_field(text) for text in fields] or None,
        "flush_interval": flush_interval,
    }
    collection = _collection(config, {key: value for key, value in flags.items() if value is not None})
    consumer = _consumer(queue, manifest)
    with Progress() as progress:
        _Service(collection, settings, consumer, poll_interval, progress, as_json=as_json).run()
    return ExitCode.OK


def _collection(path: str | None, flags: dict[str, Setting]) -> VectorConfig:
    from penstock.vector import VectorConfig

    layer = load_mapping(path) if path is not None else {}
    return VectorConfig.from_mapping(merge(layer, flags), where=path or "the command line")


def _field(text: str) -> dict[str, Setting]:
    parts = text.rsplit(":", 2) if text.endswith(":indexed") else text.rsplit(":", 1)
    if len(parts) < 2 or not parts[0]:
        raise ConfigError(f"--field {text!r}: write NAME:TYPE, or NAME:TYPE:indexed")
    return {"name": parts[0], "type": parts[1], "indexed": len(parts) == 3}


def _address(store: str) -> str:
    return store if "://" in store else f"file://{os.path.abspath(store)}"


def _consumer(queue: str | None, manifest: str | None) -> ConsumerConfig | None:
    if queue is None:
        return None
    # A queue that is shorter than what was read of it is another one: going on would pass over its records.
    if manifest is None:
        return ConsumerConfig(store=_address(queue), prefetch=1, strict_resume=True)
    return ConsumerConfig(store=_address(queue), manifest_path=manifest, prefetch=1, strict_resume=True)


class _Service:
    """The server and its feed, and what people are told of them."""

    def __init__(
        self,
        collection: VectorConfig,
        settings: VectorSettings,
        queue: ConsumerConfig | None,
        poll_interval: str,
        progress: Progress,
        *,
        as_json: bool,
    ) -> None:
        self._collection = collection
        self._settings = settings
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
        from penstock.server.vector import serve as serve_vectors

        await serve_vectors(
            self._collection,
            self._settings,
            stop,
            source=None if self._queue is None else self._make_feed,
            on_bound=self._bound,
            on_ready=self._ready,
        )

    def _make_feed(self, store: VectorStore, registry: Registry) -> Feed:
        from penstock.services.feeding import Feed, FeedConfig
        from penstock.services.vector_feed import FedVectors

        assert self._queue is not None
        self._feed = Feed(
            FeedConfig(queue=self._queue, poll_interval=self._poll_interval),
            FedVectors(store),
            registry=registry,
            on_progress=self._show,
        )
        return self._feed

    def _bound(self, host: str, port: int) -> None:
        name = f"[{host}]" if ":" in host else host
        _LOG.info("listening on http://%s:%d", name, port)
        self._tell("listening", host=host, port=port)

    def _ready(self, store: VectorStore) -> None:
        _LOG.info("%d vectors of %d dimensions", len(store), store.collection.dimensions)
        self._tell("ready", vectors=len(store), dimensions=store.collection.dimensions)

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
