"""The minimum time of a synced write: the disk alone, and a server that does nothing else."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import cast

import uvloop

__all__ = ["DiskFloor", "bare_server"]

_FILE_BYTES = 16 * 1024**2
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 180\r\n\r\n" + b" " * 180


class DiskFloor:
    """Synced writes of one size, each to the next position of a file that was zero-filled and synced."""

    def __init__(self, path: Path, byte_count: int) -> None:
        self._record = os.urandom(byte_count)
        self._at = 0
        with path.open("wb") as file:
            file.write(bytes(_FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        self._number = os.open(path, os.O_RDWR)

    def __enter__(self) -> DiskFloor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._number)

    def write(self) -> None:
        """One write, durable when this returns."""
        os.pwritev(self._number, [self._record], self._at, os.RWF_DSYNC)
        self._at = (self._at + len(self._record)) % (_FILE_BYTES - len(self._record))

    def median_us(self, seconds: float) -> float:
        """Return the median of as many writes as fit into the given seconds."""
        taken: list[float] = []
        end_s = time.perf_counter() + seconds
        while not taken or time.perf_counter() < end_s:
            began = time.perf_counter()
            self.write()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken) * 1e6


class _BareProtocol(asyncio.Protocol):
    """Protocol that treats all received bytes as a request."""

    def __init__(self, disk: DiskFloor) -> None:
        self._disk = disk

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._disk.write()
        self._transport.write(_ANSWER)


async def _serve(disk: DiskFloor) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _BareProtocol(disk), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the parent process exits


@contextmanager
def bare_server(path: Path, byte_count: int) -> Iterator[int]:
    """Run the server in its own process. Yield its port."""
    command = [sys.executable, __file__, str(path), str(byte_count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(30)


if __name__ == "__main__":
    with (
        DiskFloor(Path(sys.argv[1]), int(sys.argv[2])) as floor,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(floor))
