"""What Arrow writes a file into, so that the bytes go through the file-system seam."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from xxhash import xxh3_64

from penstock.storage import Buffer

__all__ = ["ArrowSink"]

_GROUP_BYTES: Final = 1024 * 1024


class ArrowSink:
    """Passes on what Arrow writes into `stream`, and counts and hashes it.

    Small pieces are joined by Arrow itself: a file of many small batches has many thousands of them.
    """

    closed = False

    def __init__(self, write: Callable[[Sequence[Buffer]], None]) -> None:
        self._write = write
        self._hash = xxh3_64()
        self.size = 0

    @contextmanager
    def stream(self) -> Iterator[pa.NativeFile]:
        """What Arrow writes into. Everything has been passed on when the block is left."""
        with pa.BufferedOutputStream(pa.PythonFile(self, mode="w"), _GROUP_BYTES) as stream:
            yield stream

    @property
    def xxh3(self) -> str:
        """XXH3-64 of all bytes, in hex."""
        return self._hash.hexdigest()

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._write([view])
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing: every piece is passed on at once."""

    def close(self) -> None:
        """Nothing: whoever gave `write` owns the file."""
