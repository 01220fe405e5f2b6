"""The queue of a command: its settings, from a file, the environment and flags."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import click

from penstock.buffer import (
    ConsumerConfig,
    ProducerConfig,
    QueueReader,
    config_from_mapping,
    read_shards,
)
from penstock.cli.base import Command, command, injected
from penstock.config import Setting, from_env, load_mapping, merge, unknown_key
from penstock.errors import ConfigError, NotFound
from penstock.objects import ObjectStore, StoreConfig, open_store

ENVIRONMENT = "PENSTOCK_BUFFER__"

C = TypeVar("C", ProducerConfig, ConsumerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The settings of a queue, before a config is built from them. Secrets stay out of `repr`."""

    where: str
    settings: dict[str, Setting] = field(repr=False)

    @classmethod
    def of(
        cls,
        store: str | None,
        *,
        config: str | None = None,
        manifest: str | None = None,
        prefix: str | None = None,
        store_options: Iterable[str] = (),
    ) -> Target:
        """Merge the file, the environment and the command line; later ones win. Raise `ConfigError`."""
        layer = _file_layer(config)
        environment = from_env(ENVIRONMENT, os.environ)
        if store is not None or "store" in environment:
            layer.pop("object_store", None)
        flags = {"store": store, "manifest_path": manifest, "data_path_prefix": prefix}
        settings = merge(layer, environment, {k: v for k, v in flags.items() if v is not None})
        where = config or ("the environment" if environment else "the command line")
        _check_names(settings, where)
        if "store" not in settings and "object_store" not in settings:
            raise click.UsageError("Missing argument 'STORE'. Give it, or a --config that names it.")
        options = dict(_split_option(option) for option in store_options)
        return cls(where=where, settings=_with_options(settings, options) if options else settings)

    def build(self, kind: type[C], **overrides: Setting) -> C:
        """Build a config of `kind` from those settings that `kind` has."""
        own = {field.name for field in dataclasses.fields(kind)} | {"object_store"}
        chosen = {name: value for name, value in self.settings.items() if name in own}
        chosen |= {name: value for name, value in overrides.items() if value is not None}
        return config_from_mapping(kind, chosen, where=self.where)

    @asynccontextmanager
    async def open(self, kind: type[C], *, existing: bool = True, **overrides: Setting) -> AsyncIterator[C]:
        """Build a config and open its store. Raise `NotFound` if it must be `existing` and is missing."""
        config = self.build(kind, **overrides)
        store = open_store(config.store)
        if existing:
            _check_directory(store.url)
        try:
            yield dataclasses.replace(config, store=store)
        finally:
            await store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """An unsharded queue: the target itself, or one of its shards."""

    shard: int | None
    config: ConsumerConfig
    reader: QueueReader

    @property
    def store(self) -> ObjectStore:
        return self.reader.store

    @property
    def prefix(self) -> str:
        return self.config.prefix


async def queues_of(config: ConsumerConfig, *, required: bool = True) -> list[Queue]:
    """Return the queue, or all its shards. Raise `NotFound` if it is `required` and does not exist."""
    store = open_store(config.store)
    shards = await read_shards(store, config)
    plain = _queue(store, config, None)
    exists = (await plain.reader.snapshot()).version is not None
    if shards.count is None:
        if required and not exists:
            raise NotFound(
                f"there is no manifest {config.manifest_key} in {store.url}: nothing was produced there, "
                "or --manifest is needed"
            )
        return [plain]
    sharded = [_queue(store, own, shard) for shard, own in shards.configs.items()]
    return [plain, *sharded] if exists else sharded


def _queue(store: ObjectStore, config: ConsumerConfig, shard: int | None) -> Queue:
    reader = QueueReader(
        store,
        config.manifest_key,
        batch_bytes_max=config.batch_bytes_max,
        retry_deadline_s=config.retry_deadline_s,
    )
    return Queue(shard=shard, config=config, reader=reader)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """The queue options on the command line."""

    store: str | None
    manifest: str | None
    prefix: str | None
    config: str | None
    store_options: tuple[str, ...] = field(repr=False)

    def target(self) -> Target:
        """Merge these options with the file and the environment. Raise `ConfigError` if they are invalid."""
        return Target.of(
            self.store,
            config=self.config,
            manifest=self.manifest,
            prefix=self.prefix,
            store_options=self.store_options,
        )


queue_options = injected(
    "queue",
    QueueOptions,
    click.argument("store", required=False),
    click.option("--manifest", metavar="PATH", help="Key of the manifest [default: ingest/manifest]."),
    click.option("--prefix", metavar="PATH", help="Folder of the batches [default: ingest]."),
    click.option(
        "--config",
        type=click.Path(dir_okay=False),
        metavar="FILE.yaml",
        help=f"Settings of the queue; {ENVIRONMENT}* variables and flags override them.",
    ),
    click.option(
        "--store-option",
        "store_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="A setting of the store, such as endpoint or region; may be repeated.",
    ),
)
"""Passes the `queue` options to a command."""


def queue_command(name: str | None = None) -> Callable[[Command], click.Command]:
    """Turn a coroutine function into a command that receives the `target` queue and its `out`."""

    def decorate(function: Command) -> click.Command:
        @functools.wraps(function)
        def with_target(queue: QueueOptions, **given: object) -> object:
            return asyncio.run(cast("Coroutine[Any, Any, object]", function(target=queue.target(), **given)))

        return command(name)(queue_options(with_target))

    return decorate


def _file_layer(path: str | None) -> dict[str, Setting]:
    if path is None:
        return {}
    layer = load_mapping(path)
    section = layer.get("buffer")
    if not isinstance(section, dict):
        return layer
    return dict(section)


def _check_names(settings: dict[str, Setting], where: str) -> None:
    """Check that each name is a setting of producers or of consumers: a file may contain both."""
    known = {field.name for kind in (ProducerConfig, ConsumerConfig) for field in dataclasses.fields(kind)}
    for name in settings:
        if name not in known | {"object_store"}:
            raise unknown_key(f"{where}: {name}", name, known | {"object_store"})


def _split_option(option: str) -> tuple[str, str]:
    name, separator, value = option.partition("=")
    if not separator or not name:
        # Do not quote the option: it may be a secret whose name is missing.
        raise click.BadParameter("expected NAME=VALUE", param_hint="'--store-option'")
    return name, value


def _with_options(settings: dict[str, Setting], options: dict[str, str]) -> dict[str, Setting]:
    store = settings.get("store")
    if isinstance(store, str):
        return settings | {"store": StoreConfig(url=store, options=options)}
    if isinstance(store, dict):
        return settings | {"store": merge(store, {"options": options})}
    raise ConfigError("--store-option needs a store given by its address (STORE, or `store` in the file)")


def _check_directory(url: str) -> None:
    path = url.removeprefix("file://")
    if path == url or os.path.isdir(path):
        return
    if os.path.exists(path):
        raise NotFound(f"{path} is a file; a store is a directory")
    raise NotFound(f"there is no directory {path}")
