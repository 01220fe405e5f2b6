"""Helpers shared by all tasks: one store per worker process, prefetching, and garbage collection.

Spark reuses a worker process for later tasks. A store is opened in the process that uses it, because the
clients of object stores do not survive a fork.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias, TypeVar

import pyarrow as pa

from penstock.objects import ObjectStore, StoreConfig, open_store

FETCH_AHEAD: Final = 4
FETCH_AHEAD_BYTES: Final = 128 << 20
"""Prefetching pauses while this many bytes wait for Spark to take them."""

T = TypeVar("T")
_Fetch: TypeAlias = "Future[pa.RecordBatch]"
_stores: dict[tuple[int, str, tuple[tuple[str, str], ...]], ObjectStore] = {}
_modules_frozen = 0


def worker_store(config: StoreConfig) -> ObjectStore:
    """Return this process's store for `config`."""
    key = (os.getpid(), config.url, tuple(sorted(config.options.items())))
    store = _stores.get(key)
    if store is None:
        store = _stores[key] = open_store(config)
    return store


def load_ahead(load: Callable[[T], pa.RecordBatch], pieces: Sequence[T]) -> Iterator[pa.RecordBatch]:
    """Load every piece and yield the results in order. Up to four loads run at a time.

    Raise what `load` raises.
    """
    with ThreadPoolExecutor(FETCH_AHEAD, thread_name_prefix="penstock-fetch") as pool:
        waiting: deque[_Fetch] = deque()
        try:
            yield from _in_order(pool, load, pieces, waiting)
        finally:
            for fetch in waiting:
                fetch.cancel()


def _in_order(
    pool: ThreadPoolExecutor,
    load: Callable[[T], pa.RecordBatch],
    pieces: Sequence[T],
    waiting: deque[_Fetch],
) -> Iterator[pa.RecordBatch]:
    todo = deque(pieces)
    while todo or waiting:
        while (
            todo and len(waiting) < FETCH_AHEAD and (not waiting or _bytes_ready(waiting) < FETCH_AHEAD_BYTES)
        ):
            waiting.append(pool.submit(load, todo.popleft()))
        yield waiting.popleft().result()


def _bytes_ready(waiting: deque[_Fetch]) -> int:
    return sum(f.result().nbytes for f in waiting if f.done() and not f.cancelled() and not f.exception())


def freeze_modules() -> None:
    """Exclude the objects of imported modules from garbage collection.

    A worker collects garbage after every task, and traversing all modules costs more than a small task.
    Freeze only if modules were imported since the last call, so that ordinary garbage is still collected.
    """
    global _modules_frozen
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()
