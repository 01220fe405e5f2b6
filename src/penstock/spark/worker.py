"""The parts that all tasks share: stores of the worker process, fetching ahead, and garbage collection.

Spark keeps a worker process for its next task. Handles to a store are created in the process that uses them,
since clients of object stores do not survive a fork.
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
"""Stop fetching ahead while this much waits for Spark to take it."""

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
    """Load every piece and yield the results in order; up to four are loaded at a time. Raises what `load`
    raises."""
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
        while todo and len(waiting) < FETCH_AHEAD and (not waiting or _held(waiting) < FETCH_AHEAD_BYTES):
            waiting.append(pool.submit(load, todo.popleft()))
        yield waiting.popleft().result()


def _held(waiting: deque[_Fetch]) -> int:
    return sum(f.result().nbytes for f in waiting if f.done() and not f.cancelled() and not f.exception())


def freeze_modules() -> None:
    """Exclude the objects of imported modules from garbage collection.

    A worker collects garbage after every task, and going through all modules costs more than a small task.
    Freeze only when modules were added, so that ordinary garbage is still collected.
    """
    global _modules_frozen
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()
