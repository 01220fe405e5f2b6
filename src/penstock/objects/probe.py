"""A check that a store honours conditional writes.

Some stores with the S3 API return 200 and overwrite. There, two writers silently undo each other, so each
store is checked once before it is used.
"""

from __future__ import annotations

import os
import uuid

from penstock.errors import Conflict, OutcomeUnknown, Unavailable, Unsupported
from penstock.objects.keys import join_key
from penstock.objects.settings import REMOTE_SCHEMES
from penstock.objects.store import ObjectStore, Version

_CHECKED: set[tuple[int, str]] = set()


async def check_conditional_writes(store: ObjectStore, folder: str) -> None:
    """Try every condition on a new object below `folder`, which is removed afterwards.

    Raises `Unsupported` naming the condition that was ignored, or the error of the store.
    """
    key = join_key(folder, f"probe-{uuid.uuid4().hex}")
    try:
        first = await store.put_if_absent(key, b"first")
        await _must_conflict_on_create(store, key)
        await _replace(store, key, first)
        await _must_conflict_on_replace(store, key, first)
        if bytes((await store.get(key)).data) != b"second":
            raise Unsupported(f"{store.url} does not return what was stored a moment ago; {_ADVICE}")
    finally:
        await store.delete_many([key])


async def ensure_conditional_writes(store: ObjectStore, folder: str) -> None:
    """Check a remote store once per process. Local stores are known to honour conditions.

    Raises `Unavailable` if the store could not be reached; then call it again.
    """
    checked = (os.getpid(), store.url)
    if store.url.partition("://")[0] not in REMOTE_SCHEMES or checked in _CHECKED:
        return
    try:
        await check_conditional_writes(store, folder)
    except OutcomeUnknown as error:
        raise Unavailable(f"{store.url} could not be asked for conditional writes: {error}") from error
    _CHECKED.add(checked)


_ADVICE = "use a store with strongly consistent conditional writes"


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
