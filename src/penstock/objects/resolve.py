"""From an address to a store."""

from __future__ import annotations

import os

from penstock.errors import ConfigError
from penstock.objects.directory import LOCK_WAIT_S
from penstock.objects.local import LocalStore
from penstock.objects.memory import named_memory_store
from penstock.objects.settings import StoreAddress, StoreConfig
from penstock.objects.store import ObjectStore

__all__ = ["open_store"]


def open_store(spec: str | StoreConfig | ObjectStore, *, deadline_s: float | None = None) -> ObjectStore:
    """The store at `spec`: a path, `file:///path`, `memory://name`, `s3://bucket/folder`, `az://`, `gs://`.

    A store given as such is returned as it is. Nothing is contacted yet. `deadline_s` is how long the caller
    retries: a directory waits no longer than that for another writer's lock. Raises `ConfigError`.
    """
    if isinstance(spec, str):
        spec = StoreConfig(url=spec)
    if not isinstance(spec, StoreConfig):
        if isinstance(spec, ObjectStore):
            return spec
        raise ConfigError(
            f"store: expected a url, a path, a StoreConfig or a store, found {type(spec).__name__}"
        )
    address = StoreAddress.parse(spec.url)
    if address.scheme not in ("file", "memory"):
        # Imported late: the client is a large native library that local work does not need.
        from penstock.objects.remote import RemoteStore

        return RemoteStore(spec)
    if spec.options:
        raise ConfigError(
            f"store: {address.scheme}:// takes no options, found {', '.join(sorted(spec.options))}"
        )
    if address.scheme == "memory":
        return named_memory_store(address.bucket)
    lock_wait_s = LOCK_WAIT_S if deadline_s is None else min(LOCK_WAIT_S, deadline_s)
    return LocalStore(os.path.abspath(os.path.expanduser(address.path)), lock_wait_s=lock_wait_s)
