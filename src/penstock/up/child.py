"""A process of the fleet: started, listened to, stopped, and gone with everything that it has started.

Its standard input is a pipe that nobody writes to: it ends when the fleet does, however that ends, and the
process ends with it. It has a session of its own, so that Ctrl-C is for the fleet alone, and what it has
started can be killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

from penstock.up.lifecycle import Exit
from penstock.up.log import Splitter

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 64 * 1024
_LAST_WORDS_S: Final = 2.0
"""How long output is waited for after the process has ended: somebody else may hold the pipe."""


class Child:
    """One run of a command. `heard` and `logged` get the lines of standard output and error."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        number: _Number,
        exited: asyncio.Future[int],
        listening: list[asyncio.Task[None]],
    ) -> None:
        self._process = process
        self._number = number
        self._exited = exited
        self._listening = listening

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        heard: Callable[[str], None],
        logged: Callable[[str], None],
    ) -> Child:
        """Raises `OSError` if there is no such command, or no room for a process."""
        process = subprocess.Popen(  # noqa: ASYNC220 - it returns as soon as the process runs
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        number = _Number(process)
        exited = _watch(number, f"penstock-wait-{process.pid}", asyncio.get_running_loop())
        listening = []
        for pipe, told in ((process.stdout, heard), (process.stderr, logged)):
            assert pipe is not None
            listening.append(asyncio.create_task(_listen(pipe, told)))
        return cls(process, number, exited, listening)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> Exit:
        """Until it has ended; whatever it has started and left behind is killed."""
        returncode = await asyncio.shield(self._exited)
        _, late = await asyncio.wait(self._listening, timeout=_LAST_WORDS_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        return Exit.of(returncode)

    def terminate(self) -> None:
        """Ask it to stop."""
        self._number.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and everything that it has started and that is still in its group, at once."""
        self._number.kill_group()


class _Number:
    """A process by its number, which is another's as soon as the process was waited for: never used then."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._is_gone = False

    def signal(self, number: int) -> None:
        with self._lock:
            if not self._is_gone:
                os.kill(self._process.pid, number)

    def kill_group(self) -> None:
        with self._lock:
            if not self._is_gone:
                self._kill_group()

    def wait(self) -> int:
        """Until it has ended; its group is killed while its number is still its own."""
        if hasattr(os, "waitid"):  # where there is none, the number is free for a moment before it is used
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._lock:
            self._kill_group()
            self._is_gone = True
            return self._process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _watch(number: _Number, name: str, loop: asyncio.AbstractEventLoop) -> asyncio.Future[int]:
    """What the process ends with, as soon as it has.

    A thread waits for it: asyncio's own processes end only with their pipes, which somebody whom the process
    has started may hold long after it.
    """
    exited: asyncio.Future[int] = loop.create_future()

    def tell(returncode: int) -> None:
        if not exited.done():
            exited.set_result(returncode)

    def wait() -> None:
        returncode = number.wait()
        with contextlib.suppress(RuntimeError):  # the loop is gone, and so is whoever wanted to know
            loop.call_soon_threadsafe(tell, returncode)

    threading.Thread(target=wait, name=name, daemon=True).start()
    return exited


async def _listen(pipe: IO[bytes], heard: Callable[[str], None]) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    splitter = Splitter()
    try:
        while data := await reader.read(_CHUNK_BYTES):
            for line in splitter.feed(data):
                _tell(heard, line)
            # A part that prints without end must not keep the loop from the others.
            await asyncio.sleep(0)
        if (rest := splitter.rest()) is not None:
            _tell(heard, rest)
    finally:
        transport.close()


def _tell(heard: Callable[[str], None], line: str) -> None:
    """A line that nobody can take is a fault here: a pipe that is not read any more would stop its writer."""
    try:
        heard(line)
    except Exception:  # noqa: BLE001 - whatever it is, the lines behind it are wanted
        _LOG.exception("a line of a part was lost")
