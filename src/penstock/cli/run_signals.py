"""Asking a running command to stop: once politely, twice at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from penstock.cli.failure import ExitCode

__all__ = ["LeaveNow", "StopSignals"]

_CAUGHT = (signal.SIGINT, signal.SIGTERM)


class LeaveNow(BaseException):
    """Leave without finishing anything. No ordinary handler of errors may keep it back."""


class StopSignals:
    """SIGINT and SIGTERM as a question that the work asks between its steps.

    While `patient` is false there is nothing to finish, and the first signal raises `LeaveNow`; after that
    only the second does.
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
        """Catch the signals; to be called again after Spark has started, which takes SIGINT for itself."""
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
            raise LeaveNow("stopped at once; what was under way is run again at the next start")

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def name(self) -> str:
        """The signal that came first, such as SIGTERM."""
        return self._first.name if self._first else ""

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.INTERRUPTED if self._first is signal.SIGINT else ExitCode.TERMINATED

    def wait(self, timeout_s: float) -> bool:
        """Sleep unless and until a signal comes; true when one came."""
        return self._asked.wait(timeout_s)
