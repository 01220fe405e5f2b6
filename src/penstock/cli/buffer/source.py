"""Bytes from a file or from standard input, read by a thread so that a signal is never kept waiting."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator

from penstock.errors import InvalidInput, NotFound

__all__ = ["open_source", "read_chunks"]

CHUNK_BYTES = 1024 * 1024
CHUNKS_AHEAD = 4


def open_source(path: str) -> int:
    """A file descriptor to read; "-" is standard input. Raises `NotFound`."""
    if path == "-":
        return 0
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error


async def read_chunks(descriptor: int, stop: asyncio.Event) -> AsyncIterator[bytes]:
    """Chunks until the end of the input or until `stop` is set, whichever comes first.

    The thread reads the descriptor itself: it may hang in a read of a terminal for ever, and must then
    hold no lock that the interpreter wants when it exits.
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
                return  # the loop has gone: nobody wants more
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
