"""Stop signals of commands: the first one lets the command finish its work, the second one does not."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from penstock.cli.failure import ExitCode

_CAUGHT = (signal.SIGINT, signal.SIGTERM)


def signal_code(number: signal.Signals | None) -> ExitCode:
    """Return the exit code of a command stopped by this signal."""
    return ExitCode.INTERRUPTED if number is signal.SIGINT else ExitCode.TERMINATED


class LoopStop:
    """Handles SIGINT and SIGTERM on an event loop: the first calls `stop`, the second ends the command."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self.first: signal.Signals | None = None
        self._stop = stop
        for number in _CAUGHT:
            asyncio.get_running_loop().add_signal_handler(number, self._caught, number)

    def _caught(self, number: signal.Signals) -> None:
        if self.first is not None:  # the second signal: do not finish
            raise KeyboardInterrupt
        self.first = number
        self._stop()


class LeaveNow(BaseException):
    """Ends the command without finishing its work. Not an `Exception`, so that handlers do not catch it."""


class StopSignals:
    """SIGINT and SIGTERM for work that checks for them between its steps.

    While `patient` is False, there is nothing to finish, and the first signal raises `LeaveNow`. After that,
    only the second signal does.
    """

    def __init__(self) -> None:
        self.patient = False
        self._asked = threading.Event()
        self._first: signal.Signals | None = None
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in _CAUGHT}
        self.install()
        return self

    def install(self) -> None:
        """Install the handlers. Call it again after Spark has started: Spark replaces that of SIGINT."""
        for number in _CAUGHT:
            signal.signal(number, self._caught)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        again = self._first is not None
        self._first = self._first or signal.Signals(number)
        self._asked.set()
        if again or not self.patient:
            raise LeaveNow("stopped immediately; unfinished work is repeated at the next start")

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def name(self) -> str:
        """The name of the first signal, such as SIGTERM."""
        return self._first.name if self._first else ""

    @property
    def exit_code(self) -> ExitCode:
        return signal_code(self._first)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a signal arrives or the timeout expires. Return True for a signal."""
        return self._asked.wait(timeout_s)
