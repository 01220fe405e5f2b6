"""Loading a few pieces ahead of whoever takes them, in order and within a bound of memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias, TypeVar

import pyarrow as pa

FETCH_AHEAD: Final = 4
FETCH_AHEAD_BYTES: Final = 128 << 20
"""Stop fetching ahead while this much waits for Spark to take it."""

T = TypeVar("T")
_Fetch: TypeAlias = "Future[pa.RecordBatch]"


def load_ahead(load: Callable[[T], pa.RecordBatch], pieces: Sequence[T]) -> Iterator[pa.RecordBatch]:
    """`load` of every piece, in order; up to four are loaded at a time. Raises what `load` raises."""
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
