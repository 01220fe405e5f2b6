"""`penstock vector serve`: the vector database in the foreground."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from penstock.cli.database_service import (
    DatabaseService,
    address,
    listening_options,
    queue_config,
    queue_options,
    start_logging,
)
from penstock.cli.failure import ExitCode
from penstock.config import Setting, load_mapping, merge
from penstock.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from penstock.metrics import Registry
    from penstock.services import FedDatabase
    from penstock.vector import VectorConfig, VectorStore

__all__ = ["serve"]

_ENVIRONMENT = """\b
Environment:
  VECTOR_API_KEYS   key[:scopes],… with the scopes read, write, delete and admin

SIGTERM or Ctrl-C ends it with exit code 0, after everything it took is durable; with 6 if the store does not
take it in time. A process that is fenced by a newer one ends with exit code 4.
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
@listening_options(8080)
@queue_options("vectors")
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
    adopt_queue: str | None,
    on_bad_batch: str,
    flush_interval: str | None,
    acknowledge: str,
    acknowledge_timeout: str,
    config: str | None,
    allow_no_keys: bool,
    allow_host: tuple[str, ...],
    as_json: bool,
) -> int:
    """Serve the collection of vectors in STORE: upserts, deletions and searches as JSON over HTTP.

    STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…. Starting it fences whoever served
    the same collection before. What is said about an existing collection has to be true.
    """
    try:
        from penstock.http import Keyring
        from penstock.servers import VectorSettings, serve_vector
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
        allowed_hosts=allow_host,
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
    collection = _collection(config, {key: value for key, value in flags.items() if value is not None})
    DatabaseService(
        partial(serve_vector, collection, settings),
        fed=_fed,
        about=_about,
        queue=queue_config(queue, manifest, poll_interval, adopt_queue, on_bad_batch),
        as_json=as_json,
    ).run()
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


def _fed(store: VectorStore, registry: Registry) -> FedDatabase:
    from penstock.services import FedVectors

    return FedVectors(store)


def _about(store: VectorStore) -> tuple[str, dict[str, object]]:
    dimensions = store.collection.dimensions
    words = f"{len(store)} vectors of {dimensions} dimensions"
    return words, {"vectors": len(store), "dimensions": dimensions}
