"""Child processes: started in their own session, stopped with a deadline, killed with their process group.

`ChildProcess` blocks. `AsyncChild` belongs to an event loop and reads the output of its process. Both kill a
process group without the risk that its number has been reused.

A child can be made to end with this process, even if this process is killed. Its standard input is then a
pipe that nothing writes to. The kernel closes the pipe when the last process that holds the other end exits,
and `end_with_parent` in the child reacts to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final, Protocol

__all__ = [
    "AsyncChild",
    "ChildProcess",
    "Exit",
    "Lines",
    "OutputReader",
    "Splitter",
    "Tail",
    "end_with_parent",
]

_LOG = logging.getLogger(__name__)

LINE_MAX: Final = 4096
"""Bytes kept of one line."""
_POLL_MIN_S: Final = 0.0005
_POLL_MAX_S: Final = 0.05
_CHUNK_BYTES: Final = 64 * 1024
_OUTPUT_AFTER_EXIT_S: Final = 2.0
"""How long to read output after the process has ended; another process may hold the pipe open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: with an exit code, or killed by a signal."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, returncode: int) -> Exit:
        """Convert Python's return code, which is negative for a signal."""
        return cls(signal=-returncode) if returncode < 0 else cls(code=returncode)

    @property
    def reason(self) -> str:
        """Return how it ended as a predicate, such as "was killed by signal 9 (SIGKILL)"."""
        return f"was {self}" if self.signal is not None else f"ended with {self}"

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):  # a real-time signal has no name
            return f"killed by signal {self.signal} ({signal.Signals(self.signal).name})"
        return f"killed by signal {self.signal}"


class ChildProcess:
    """A child process. Its methods may be called from any thread."""

    def __init__(self, process: subprocess.Popen[bytes], *, owns_group: bool) -> None:
        self._process = process
        self._owns_group = owns_group
        self._lock = threading.Lock()
        self._exit: Exit | None = None

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        own_session: bool = True,
    ) -> ChildProcess:
        """Start a command. Raise `OSError` if it does not exist or no process can be created.

        With `own_session`, it receives no Ctrl-C from the terminal, and `kill` reaches its whole process
        group.
        """
        process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, start_new_session=own_session
        )
        return cls(process, owns_group=own_session)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def streams(self) -> tuple[IO[bytes] | None, IO[bytes] | None, IO[bytes] | None]:
        """The pipes to standard input, output and error; None for a pipe that was not requested."""
        return self._process.stdin, self._process.stdout, self._process.stderr

    def poll(self) -> Exit | None:
        """Return how the process ended, or None while it runs."""
        with self._lock:
            if self._exit is None and (returncode := self._process.poll()) is not None:
                self._exit = Exit.of(returncode)
            return self._exit

    def wait(self, *, kill_group: bool = False) -> Exit:
        """Wait until the process has ended. With `kill_group`, kill the rest of its process group."""
        with contextlib.suppress(ChildProcessError):  # `poll` has already reaped it
            if hasattr(os, "waitid"):  # without it, the pid may be reused before the group is killed
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            else:
                self._process.wait()
        with self._lock:
            if kill_group and self._exit is None:
                self._kill()
            self._exit = self._exit or Exit.of(self._process.wait())
            return self._exit

    def wait_for(self, timeout_s: float) -> Exit | None:
        """Wait at most `timeout_s` until the process has ended. Return None if it still runs."""
        deadline_s, pause_s = time.monotonic() + timeout_s, _POLL_MIN_S
        while (ended := self.poll()) is None and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        return ended

    def terminate(self) -> None:
        """Send SIGTERM. Do nothing after the process has ended."""
        with self._lock:
            if self._exit is None:
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and, if it has its own session, its whole process group."""
        with self._lock:
            if self._exit is None:
                self._kill()

    def finish(self, timeout_s: float) -> Exit:
        """Wait at most `timeout_s`, then kill the process. Return how it ended."""
        if (ended := self.wait_for(timeout_s)) is not None:
            return ended
        self.kill()
        return self.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._owns_group:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                os.kill(self._process.pid, signal.SIGKILL)


class OutputReader(Protocol):
    """Receives the output of one pipe. Not called again after `end`."""

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class AsyncChild:
    """A child process on an event loop; `OutputReader`s receive its output and errors."""

    def __init__(
        self,
        process: ChildProcess,
        exited: asyncio.Future[Exit],
        transfers: list[asyncio.Task[None]],
        *,
        held: IO[bytes] | None,
    ) -> None:
        self._process = process
        self._exited = exited
        self._transfers = transfers
        self._held = held

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: OutputReader | None = None,
        errors: OutputReader | None = None,
        input: bytes | None = None,
        kill_group: bool = True,
    ) -> AsyncChild:
        """Start a command. Raise `OSError` if it does not exist or no process can be created.

        Without a reader, the child inherits the output of this process. Without `input`, standard input stays
        open until the child has ended. With `kill_group`, the rest of its process group is killed when it
        ends.
        """
        process = ChildProcess.start(
            command,
            environment=environment,
            stdin=subprocess.PIPE,
            stdout=None if output is None else subprocess.PIPE,
            stderr=None if errors is None else subprocess.PIPE,
        )
        exited = _watch(process, asyncio.get_running_loop(), kill_group=kill_group)
        _, *pipes = process.streams
        transfers = [
            asyncio.create_task(_drain(pipe, reader))
            for pipe, reader in zip(pipes, (output, errors), strict=True)
            if pipe is not None and reader is not None
        ]
        stdin = process.streams[0]
        assert stdin is not None
        if input is not None:
            # A thread, because the child may never read its input. Nothing waits for the thread.
            threading.Thread(target=_write, args=(stdin, input), daemon=True).start()
        return cls(process, exited, transfers, held=stdin if input is None else None)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> Exit:
        """Wait until the process has ended and its output has been read."""
        how = await asyncio.shield(self._exited)
        if self._transfers:
            _, late = await asyncio.wait(self._transfers, timeout=_OUTPUT_AFTER_EXIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._transfers, return_exceptions=True)
        if self._held is not None:
            self._held.close()
        return how

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its whole process group."""
        self._process.kill()


def _write(stdin: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(OSError), stdin:  # OSError: the process has closed its input, or has ended
        stdin.write(data)


def _watch(
    process: ChildProcess, loop: asyncio.AbstractEventLoop, *, kill_group: bool
) -> asyncio.Future[Exit]:
    """Return a future that resolves when the process ends.

    A thread waits for the process. asyncio's own subprocess ends only when its pipes close, and a grandchild
    may hold a pipe long after the process has ended.
    """
    exited: asyncio.Future[Exit] = loop.create_future()

    def settle(how: Exit) -> None:
        if not exited.done():
            exited.set_result(how)

    def wait() -> None:
        how = process.wait(kill_group=kill_group)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the future
            loop.call_soon_threadsafe(settle, how)

    threading.Thread(target=wait, name=f"penstock-wait-{process.pid}", daemon=True).start()
    return exited


async def _drain(pipe: IO[bytes], reader: OutputReader) -> None:
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        while data := await stream.read(_CHUNK_BYTES):
            reader.feed(data)
            # A process that prints continuously must not starve the loop.
            await asyncio.sleep(0)
        reader.end()
    finally:
        transport.close()


class Splitter:
    """Splits bytes into lines. A longer line is cut, and the number of cut bytes is appended."""

    def __init__(self, line_max: int = LINE_MAX) -> None:
        self._line_max = line_max
        self._kept = bytearray()
        self._cut = 0

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that `data` completes."""
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._keep(piece)
            yield self._line()
        self._keep(rest)

    def rest(self) -> str | None:
        """Return the text after the last line end, or None if there is none."""
        return self._line() if self._kept or self._cut else None

    def _keep(self, piece: bytes) -> None:
        room = self._line_max - len(self._kept)
        self._kept += piece[:room]
        self._cut += max(0, len(piece) - room)

    def _line(self) -> str:
        text = self._kept.decode("utf-8", "replace").rstrip("\r")
        cut, self._cut = self._cut, 0
        self._kept.clear()
        return f"{text} … ({cut} more bytes)" if cut else text


class Lines:
    """Splits output into lines and passes each to `on_line`."""

    def __init__(self, on_line: Callable[[str], None], line_max: int = LINE_MAX) -> None:
        self._on_line = on_line
        self._splitter = Splitter(line_max)

    def feed(self, data: bytes) -> None:
        for line in self._splitter.feed(data):
            self._pass_on(line)

    def end(self) -> None:
        if (rest := self._splitter.rest()) is not None:
            self._pass_on(rest)

    def _pass_on(self, line: str) -> None:
        """Deliver a line. Log errors of the receiver: an unread, full pipe would block the child."""
        try:
            self._on_line(line)
        except Exception:  # noqa: BLE001 - the following lines must be read after any error
            _LOG.exception("the handler of a child process's output failed; one line was lost")


class Tail:
    """The last bytes of the output."""

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


def end_with_parent() -> None:
    """Start a thread that kills this process and its group when standard input closes."""
    threading.Thread(target=_wait_for_parent, name="penstock-parent", daemon=True).start()


def _wait_for_parent() -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass  # treat an unreadable pipe as closed
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
