"""Search in a Delta log for the table version that a micro-batch wrote, without reading the whole log.

The versions of one app increase from entry to entry, so a binary search finds the entry. The search skips
entries of other writers, such as compactions and other applications.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Corrupt, NotFound
from penstock.ids import SYSTEM_RNG
from penstock.objects import ObjectStore, open_store
from penstock.retry import RetryPolicy, retry
from penstock.spark.tables.spec import TableSpec

_POLICY: Final = RetryPolicy(deadline_s=10.0)
_APP: Final = "penstock.app"
_VERSION: Final = "penstock.version"
_ROWS: Final = "penstock.rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaCommit:
    """A log entry that a micro-batch wrote."""

    version: int
    micro_batch: int
    rows: int
    at_ms: int | None


Entry = Callable[[int], Awaitable[DeltaCommit | None]]
"""A function that returns the entry of a version, or None if another app wrote it.

It raises `NotFound` if the log no longer has the version.
"""


def find_commit(spec: TableSpec, app: str, micro_batch: int, newest: int) -> DeltaCommit | None:
    """Return the entry of a micro-batch among the versions up to `newest`. Blocks.

    Return None if the micro-batch wrote nothing or the log no longer has its entry. Raise as the store does.
    """
    return loop_thread().run(_find(spec, app, micro_batch, newest))


async def _find(spec: TableSpec, app: str, micro_batch: int, newest: int) -> DeltaCommit | None:
    store = open_store(spec.store)
    try:
        return await search(micro_batch, newest, lambda version: _entry(store, app, version))
    finally:
        await store.close()


async def search(micro_batch: int, newest: int, entry: Entry) -> DeltaCommit | None:
    """Return the entry of `micro_batch`, or None. Call `entry` for only a few versions up to `newest`."""
    low, high = 0, newest
    while low <= high:
        middle = (low + high) // 2
        found, at = None, middle
        while at >= low:  # walk back to the nearest entry of this app
            try:
                found = await entry(at)
            except NotFound:
                low = at + 1
                break
            if found is not None:
                break
            at -= 1
        if found is None:
            low = max(low, middle + 1)
        elif found.micro_batch == micro_batch:
            return found
        elif found.micro_batch < micro_batch:
            low = middle + 1
        else:
            high = at - 1
    return None


async def _entry(store: ObjectStore, app: str, version: int) -> DeltaCommit | None:
    key = f"_delta_log/{version:020}.json"
    blob = await retry(lambda: store.get(key), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)
    try:
        return commit_in(bytes(blob.data), app, version)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{key} in {store.url} does not decode: {error!r}. Restore it") from error


def commit_in(entry: bytes, app: str, version: int) -> DeltaCommit | None:
    """Return the commit of `app` in a log entry, or None if another app wrote the entry.

    Raise the decoder's error for a damaged entry. Pure.
    """
    for line in entry.splitlines():
        if b'"commitInfo"' not in line:
            continue
        info = json.loads(line).get("commitInfo")
        if info is None:  # "commitInfo" is part of a path or a value
            continue
        if info.get(_APP) != app:
            return None
        at = info.get("timestamp")
        return DeltaCommit(
            version=version,
            micro_batch=int(info[_VERSION]),
            rows=int(info[_ROWS]),
            at_ms=int(at) if isinstance(at, int) else None,
        )
    return None
