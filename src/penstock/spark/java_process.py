"""The Java of this process: started, listened to, found dead, and forgotten.

PySpark starts one Java for a process and remembers it in `SparkContext`. It keeps no exit status, notices a
dead Java only by a connection that breaks, and never starts another one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import Unavailable
from penstock.spark.java_exit import SHORT_OF, Ending, ending_in, not_ready

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["JavaOutput", "forget_java", "java_ending", "launch_java"]

JavaOutput = Callable[[str], None]
"""Gets each line that Java and its Python workers print on standard error, in a thread of its own."""

_LINE_MAX: Final = 4096
_WORDS_KEPT: Final = 100
_LAST_WORDS_S: Final = 2.0


def launch_java(conf: Mapping[str, str], output: JavaOutput | None = None) -> None:
    """Start the Java that the next session uses, unless one runs. Without `output` it prints where this does.

    Raises `Unsupported` if Java or Spark refuses its options, `Unavailable` if it was killed or could not
    start for now.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    if java_ending() is not None:
        forget_java(None)
    with SparkContext._lock, contextlib.ExitStack() as leaving:
        if SparkContext._gateway is not None:
            return
        words = None if output is None else leaving.enter_context(_Words(output))
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
    """How the Java of this process ended. None if it runs, none was started, or another process started it.

    Waits up to `within_s` for an end: a connection breaks before the process is gone.
    """
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if not isinstance(process, subprocess.Popen):
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return None if process.returncode is None else Ending(returncode=process.returncode)


def forget_java(session: SparkSession | None) -> None:
    """Drop what PySpark remembers of a Java that is gone, so that it starts another one."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    for stale in (session, SparkContext._active_spark_context):
        if stale is not None:
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it could not say goodbye
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


class _Words:
    """The read side of Java's standard error. `end` is the side for Java, open within the block."""

    def __init__(self, output: JavaOutput) -> None:
        self._output = output
        self._kept: deque[str] = deque(maxlen=_WORDS_KEPT)
        self._source, self.end = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="penstock-java-output", daemon=True)

    def __enter__(self) -> _Words:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_end()

    def last(self) -> list[str]:
        """The last lines, once Java has ended."""
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
                # Java must never wait for a reader: whatever a line does to the listener, read the next.
                with contextlib.suppress(Exception):
                    self._output(line.rstrip("\n"))
