"""Opening a store, and checking that it honours conditional writes.

Some stores with the S3 API ignore conditions: they return 200 and overwrite the object. Two writers would
silently undo each other's changes there, so each store is checked once before it is used.
"""

from __future__ import annotations

import os
import uuid

from penstock.errors import ConfigError, Conflict, OutcomeUnknown, Unavailable, Unsupported
from penstock.objects.directory import LOCK_WAIT_S
from penstock.objects.keys import join_key
from penstock.objects.local import LocalStore
from penstock.objects.memory import named_memory_store
from penstock.objects.settings import REMOTE_SCHEMES, StoreAddress, StoreConfig
from penstock.objects.store import ObjectStore, Version

_CHECKED: set[tuple[int, str]] = set()
_ADVICE = "use a store with strongly consistent conditional writes"


def open_store(spec: str | StoreConfig | ObjectStore, *, deadline_s: float | None = None) -> ObjectStore:
    """Open the store at `spec`: a path, `file:///path`, `memory://name`, `s3://bucket/folder`, `az://`, `gs://`.

    Return an `ObjectStore` unchanged. No connection is made yet. `deadline_s` is how long the caller retries:
    a directory waits no longer than that for another writer's lock. Raise `ConfigError`.
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
        # Imported here because the client is a large native library that local stores do not need.
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


async def check_conditional_writes(store: ObjectStore, folder: str) -> None:
    """Try every condition on a new object below `folder`. Remove the object afterwards.

    Raise `Unsupported`, which names the condition that was ignored, or the error of the store.
    """
    key = join_key(folder, f"probe-{uuid.uuid4().hex}")
    try:
        first = await store.put_if_absent(key, b"first")
        await _must_conflict_on_create(store, key)
        await _replace(store, key, first)
        await _must_conflict_on_replace(store, key, first)
        if bytes((await store.get(key)).data) != b"second":
            raise Unsupported(f"{store.url} does not return data that was just stored; {_ADVICE}")
    finally:
        await store.delete_many([key])


async def ensure_conditional_writes(store: ObjectStore, folder: str) -> None:
    """Check a remote store once per process. Local stores are known to honour conditions.

    Raise `Unavailable` if the store could not be reached. Then call this again.
    """
    checked = (os.getpid(), store.url)
    if store.url.partition("://")[0] not in REMOTE_SCHEMES or checked in _CHECKED:
        return
    try:
        await check_conditional_writes(store, folder)
    except OutcomeUnknown as error:
        raise Unavailable(f"{store.url} could not be checked for conditional writes: {error}") from error
    _CHECKED.add(checked)


async def _must_conflict_on_create(store: ObjectStore, key: str) -> None:
    try:
        await store.put_if_absent(key, b"again")
    except Conflict:
        return
    raise Unsupported(f"{store.url} ignores the condition 'create only if absent' (If-None-Match); {_ADVICE}")


async def _replace(store: ObjectStore, key: str, version: Version) -> Version:
    try:
        return await store.put_if_match(key, b"second", version)
    except Conflict:
        raise Unsupported(
            f"{store.url} refuses 'replace this version' (If-Match) for the current version; {_ADVICE}"
        ) from None


async def _must_conflict_on_replace(store: ObjectStore, key: str, stale: Version) -> None:
    try:
        await store.put_if_match(key, b"third", stale)
    except Conflict:
        return
    raise Unsupported(f"{store.url} ignores the condition 'replace this version' (If-Match); {_ADVICE}")
