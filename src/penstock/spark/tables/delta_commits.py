"""The version of a Delta table that a micro-batch made, found in its log without reading all of it.

Versions of one app only rise from entry to entry, so a binary search finds its entry. Entries of others, such
as a compaction or another application's write, are skipped.
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
    """An entry of the log that a micro-batch wrote."""

    version: int
    micro_batch: int
    rows: int
    at_ms: int | None


Entry = Callable[[int], Awaitable[DeltaCommit | None]]
"""The entry of a version, None if it is not of the app. Raises `NotFound` where the log has been cleaned."""


def find_commit(spec: TableSpec, app: str, micro_batch: int, newest: int) -> DeltaCommit | None:
    """Find the entry of a micro-batch among the versions up to `newest`. Blocking; raises as the store does.

    None if the micro-batch wrote nothing there, or its entry is no longer in the log.
    """
    return loop_thread().run(_find(spec, app, micro_batch, newest))


async def _find(spec: TableSpec, app: str, micro_batch: int, newest: int) -> DeltaCommit | None:
    store = open_store(spec.store)
    try:
        return await search(micro_batch, newest, lambda version: _entry(store, app, version))
    finally:
        await store.close()


async def search(micro_batch: int, newest: int, entry: Entry) -> DeltaCommit | None:
    """Search with `entry`, which is called for a few versions."""
    low, high = 0, newest
    while low <= high:
        middle = (low + high) // 2
        found, at = None, middle
        while at >= low:  # down to the next entry of this app
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
    """Decode an app's commit from an entry of the log.

    Raises a decoder's errors for a damaged entry. Pure.
    """
    for line in entry.splitlines():
        if b'"commitInfo"' not in line:
            continue
        info = json.loads(line).get("commitInfo")
        if info is None:  # the word is part of a path or a value
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
