"""A supervised child process: a part of the fleet, or a command that the console runs.

Its standard input is a pipe that nobody writes to. The pipe is closed when this process ends, even by
SIGKILL, and the child ends with it. Each child has its own session: Ctrl-C reaches this process alone, and
whatever the child has started can be killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final, Protocol

from penstock.up.lifecycle import Exit
from penstock.up.log import LINE_MAX, Splitter

_LOG = logging.getLogger(__name__)
PART_COMMAND: Final = (sys.executable, "-m", "penstock.cli.part")
"""Runs the arguments after it as `penstock` does, and ends when its standard input does."""
_NOT_STARTED: Final = 127
_OUTPUT_BYTES_MAX: Final = 4 << 20
_ERROR_LINES: Final = 50
_ERROR_LINE_MAX: Final = 1 << 20
_CHUNK_BYTES: Final = 64 * 1024
_LAST_WORDS_S: Final = 2.0
"""How long to wait for output after the process has ended: another process may hold the pipe."""


class Child:
    """One run of a command, whose standard output and error go into `output` and `errors`."""

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
        output: Feed,
        errors: Feed,
    ) -> Child:
        """Start a command. Raises `OSError` if there is none, or no room for a process."""
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
        for pipe, feed in ((process.stdout, output), (process.stderr, errors)):
            assert pipe is not None
            listening.append(asyncio.create_task(_drain(pipe, feed)))
        return cls(process, number, exited, listening)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> Exit:
        """Wait until it has ended; kill what it has started and left running."""
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
    """A process by its number, which is never used once the process was waited for: it may be reused."""

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
        """Wait until it has ended, and kill its group while its number is still its own."""
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
    """Return a future of the exit status.

    A thread waits for it: asyncio's own processes end only with their pipes, which a child of the process may
    hold long after it has ended.
    """
    exited: asyncio.Future[int] = loop.create_future()

    def tell(returncode: int) -> None:
        if not exited.done():
            exited.set_result(returncode)

    def wait() -> None:
        returncode = number.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, returncode)

    threading.Thread(target=wait, name=name, daemon=True).start()
    return exited


class Feed(Protocol):
    """Takes what a process writes into one of its pipes. Not called again after `end`."""

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class Lines:
    """Splits into lines, each of which is given to `heard`."""

    def __init__(self, heard: Callable[[str], None], line_max: int = LINE_MAX) -> None:
        self._heard = heard
        self._splitter = Splitter(line_max)

    def feed(self, data: bytes) -> None:
        for line in self._splitter.feed(data):
            self._tell(line)

    def end(self) -> None:
        if (rest := self._splitter.rest()) is not None:
            self._tell(rest)

    def _tell(self, line: str) -> None:
        """Pass on a line; one that nobody can take is a fault here.

        A pipe that is not read any more would stop its writer.
        """
        try:
            self._heard(line)
        except Exception:  # noqa: BLE001 - whatever it is, the lines after it are wanted
            _LOG.exception("a line of a part was lost")


class Tail:
    """Keeps the last bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = b""

    def feed(self, data: bytes) -> None:
        self._held = (self._held + data)[-self._bytes_max :]

    def end(self) -> None:
        pass

    @property
    def text(self) -> str:
        return self._held.decode("utf-8", "replace")


async def _drain(pipe: IO[bytes], feed: Feed) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while data := await reader.read(_CHUNK_BYTES):
            feed.feed(data)
            # A part that prints without end must not keep the loop from the others.
            await asyncio.sleep(0)
        feed.end()
    finally:
        transport.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """How a command ended."""

    exit_code: int
    """Below zero, the number of the signal that killed it."""
    output: str
    """What it printed to standard output."""
    errors: str
    """The end of what it printed to standard error."""


async def run_command(
    arguments: Sequence[str], tell: Callable[[str], None], environment: Mapping[str, str]
) -> CommandOutcome:
    """Run `penstock ARGUMENTS…` to its end; `tell` gets its lines of standard error. Cancelling kills it.

    It ends with this process, too, however that ends. Of standard output the last 4 MiB are kept. A command
    that cannot be started has exit code 127.
    """
    errors: deque[str] = deque(maxlen=_ERROR_LINES)

    def heard(text: str) -> None:
        if line := text.rstrip():
            errors.append(line)
            tell(line)

    output = Tail(_OUTPUT_BYTES_MAX)
    lines = Lines(heard, _ERROR_LINE_MAX)
    try:
        child = await Child.start([*PART_COMMAND, *arguments], environment, output=output, errors=lines)
    except OSError as error:
        return CommandOutcome(exit_code=_NOT_STARTED, output="", errors=str(error))
    try:
        how = await child.wait()
    except asyncio.CancelledError:
        child.kill()
        await child.wait()
        raise
    code = -how.signal if how.signal is not None else how.code
    assert code is not None
    return CommandOutcome(exit_code=code, output=output.text, errors="\n".join(errors))
