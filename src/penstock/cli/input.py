"""Input of commands, from a file or standard input. A thread reads it; then it is split into records."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import struct
import threading
from collections.abc import AsyncIterator
from typing import Protocol

import click

from penstock.errors import InvalidInput, NotFound
from penstock.limits import BATCH_BYTES_MAX

CHUNK_BYTES = 1024 * 1024
CHUNKS_AHEAD = 4
RECORD_BYTES_MAX = BATCH_BYTES_MAX // 2
"""A longer record most likely means a wrong delimiter. It is refused before it fills the memory."""
_LENGTH = struct.Struct("<I")


def open_source(path: str) -> int:
    """Open a file for reading; "-" is standard input. Raise `NotFound` if it cannot be read."""
    if path == "-":
        return 0
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error


source_option = click.option(
    "--file",
    "source",
    callback=lambda ctx, option, path: open_source(path),
    default="-",
    metavar="FILE",
    help="The input; - is standard input.",
)
"""Passes the file descriptor of the input to a command."""


async def read_chunks(descriptor: int, stop: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield chunks until the input ends or `stop` is set.

    A thread reads, so that signals are handled while a read blocks. It reads the descriptor directly: a read
    from a terminal may never return, and must not hold a lock that the interpreter needs to exit.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue(CHUNKS_AHEAD)

    def read() -> None:
        while True:
            try:
                chunk: bytes | OSError = os.read(descriptor, CHUNK_BYTES)
            except OSError as error:
                chunk = error
            handing = chunks.put(chunk)
            try:
                asyncio.run_coroutine_threadsafe(handing, loop).result()
            except (RuntimeError, concurrent.futures.CancelledError):
                handing.close()
                return  # the loop is closed: no more input is wanted
            if not chunk or isinstance(chunk, OSError):
                return

    threading.Thread(target=read, name="penstock-source", daemon=True).start()
    stopping = loop.create_task(stop.wait())
    try:
        while not stop.is_set():
            arriving = loop.create_task(chunks.get())
            await asyncio.wait({arriving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                arriving.cancel()
                return
            chunk = arriving.result()
            if isinstance(chunk, OSError):
                raise InvalidInput(f"the input cannot be read: {chunk.strerror}")
            if not chunk:
                return
            yield chunk
    finally:
        stopping.cancel()


class Framing(Protocol):
    """Splits a stream into records. `pending` is the size of the incomplete record."""

    pending: int

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the records that `chunk` completes."""
        ...

    def finish(self) -> list[bytes]:
        """Return the rest at the end of the stream. Raise `InvalidInput` if it is incomplete."""
        ...


class Lines:
    """One record per line, without its newline. The last line may lack one."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.pending = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        lines = chunk.split(b"\n")
        if len(lines) > 1:
            lines[0] = b"".join([*self._parts, lines[0]])
            self._parts, self.pending = [], 0
        tail = lines.pop()
        if tail:
            self._parts.append(tail)
            self.pending = _bounded(self.pending + len(tail))
        return lines

    def finish(self) -> list[bytes]:
        rest = b"".join(self._parts)
        self._parts, self.pending = [], 0
        return [rest] if rest else []


class Whole:
    """The whole input as one record."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.pending = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        self._parts.append(chunk)
        self.pending = _bounded(self.pending + len(chunk))
        return []

    def finish(self) -> list[bytes]:
        rest = b"".join(self._parts)
        self._parts, self.pending = [], 0
        return [rest] if rest else []


class LengthPrefixed:
    """Four bytes of length, little-endian, then the record."""

    def __init__(self) -> None:
        self._held = b""
        self.pending = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        data = self._held + chunk
        records: list[bytes] = []
        position = 0
        while position + _LENGTH.size <= len(data):
            (length,) = _LENGTH.unpack_from(data, position)
            _bounded(length)
            end = position + _LENGTH.size + length
            if end > len(data):
                break
            records.append(data[position + _LENGTH.size : end])
            position = end
        self._held = data[position:]
        self.pending = len(self._held)
        return records

    def finish(self) -> list[bytes]:
        if self._held:
            raise InvalidInput(f"the input ends inside a record, after {len(self._held)} bytes of it")
        return []


def _bounded(size: int) -> int:
    if size > RECORD_BYTES_MAX:
        raise InvalidInput(
            f"a record of more than {RECORD_BYTES_MAX} bytes: is --delimiter right for this input?"
        )
    return size


FRAMINGS: dict[str, type[Lines] | type[Whole] | type[LengthPrefixed]] = {
    "newline": Lines,
    "none": Whole,
    "length-prefixed": LengthPrefixed,
}
