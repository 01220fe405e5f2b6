"""The Spark session of a command: started without log output, and restarted if its Java process has died."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError
from penstock.spark import Ending, build_session, explain, forget_java, java_ending
from penstock.up import SparkTraceFilter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_log = logging.getLogger(__name__)

_DYING_S: Final = 10.0
"""How long to wait for a lost Java process to end: after SIGTERM, it first runs its shutdown hooks."""
_QUIETED: Final = ("py4j", "pyspark", "SQLQueryContextLogger", "DataFrameQueryContextLogger")
_STANDARD_ERROR: Final = 2


class CommandSession:
    """Implements `penstock.cli.run.supervisor.Sessions`."""

    def __init__(
        self,
        name: str,
        *,
        master: str | None = None,
        remote: str | None = None,
        conf: Mapping[str, str] | None = None,
        verbose: bool = False,
    ) -> None:
        self._name = name
        self._master = master
        self._remote = remote
        self._conf = dict(conf or {})
        self._verbose = verbose
        self._session: SparkSession | None = None
        self._owned = False

    @property
    def starts_java(self) -> bool:
        """Whether opening the session starts Java."""
        return self._remote is None and "PYSPARK_GATEWAY_PORT" not in os.environ

    def open(self) -> SparkSession:
        """Return the session; start it if there is none. Raise `PenstockError` for known problems."""
        from pyspark.sql import SparkSession

        if self._session is not None:
            if _is_alive(self._session):
                return self._session
            self._forget()
        self._owned = SparkSession.getActiveSession() is None
        if self._owned and not self._verbose:
            # Spark and its bridge print every failure with two stack traces; the error is reported anyway.
            for name in _QUIETED:
                logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            self._session = build_session(
                self._name,
                master=self._master,
                remote=self._remote,
                conf=self._conf,
                java_output=None if self._verbose else JavaOutput().hear,
            )
        except PenstockError:
            raise
        except Exception as error:
            raise explain(error) or error from error
        if self._owned and not self._verbose and _is_classic(self._session):
            _silence(self._session)
        return self._session

    def is_lost(self) -> bool:
        """Whether the session has died."""
        return self._session is not None and not _is_alive(self._session)

    def java_ending(self) -> Ending | None:
        """Return how the Java of a lost session ended; None if it runs or another process started it."""
        return java_ending(_DYING_S) if self._remote is None and self.is_lost() else None

    def close(self) -> None:
        """Stop the session if it was started here, even if it has died."""
        if self._session is not None and self._owned:
            if self._remote is None:
                _end_workers()
            with contextlib.suppress(Exception):
                self._session.stop()
        self._session = None

    def _forget(self) -> None:
        """Drop a lost session, so that another one can be started."""
        session, self._session = self._session, None
        if self._remote is None:
            forget_java(session)
        elif session is not None:
            with contextlib.suppress(Exception):
                session.stop()


def end_children() -> None:
    """Terminate the child processes of this one, on systems that list them.

    Otherwise Java would detect that its parent has ended, and print a long error.
    """
    for child in _children("self"):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGTERM)


def _end_workers() -> None:
    """End Spark's idle Python workers on this machine before Java closes their sockets.

    Otherwise each worker may print a broken-pipe traceback.
    """
    for java in _children("self"):
        for daemon in _children(str(java)):
            with contextlib.suppress(OSError):
                if b"pyspark.daemon" in Path(f"/proc/{daemon}/cmdline").read_bytes().split(b"\0"):
                    os.killpg(daemon, signal.SIGTERM)  # its workers are its group


def _children(process: str) -> list[int]:
    """Return the child processes of all threads; none on systems that do not list them."""
    found: list[int] = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):
            found.extend(int(child) for child in listed.read_text(encoding="ascii").split())
    return found


def _is_classic(session: SparkSession) -> bool:
    return hasattr(session, "_jsparkSession")


def _silence(session: SparkSession) -> None:
    """Silence all of Java's loggers: `setLogLevel` does not affect those with an explicit level."""
    jvm = session.sparkContext._jvm
    assert jvm is not None
    log4j = jvm.org.apache.logging.log4j
    log4j.core.config.Configurator.setAllLevels("", log4j.Level.OFF)
    # The accumulator server's thread prints a traceback when Java dies and the connection ends.
    server = getattr(session.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = _log_broken_connection


def _log_broken_connection(request: object, address: object) -> None:
    _log.debug("a connection from Java has failed", exc_info=True)


def _is_alive(session: SparkSession) -> bool:
    with contextlib.suppress(Exception):
        if _is_classic(session):
            return not session.sparkContext._jsc.sc().isStopped()
        return bool(session.version)
    return False


class JavaOutput:
    """Prints every line on standard error, except harmless tracebacks of Spark's Python daemon."""

    def __init__(self, target: int = _STANDARD_ERROR) -> None:
        self._filter = SparkTraceFilter()
        self._target = target

    def hear(self, line: str) -> None:
        kept = [text for text, is_harmless in self._filter.hear(line) if not is_harmless]
        if kept:
            # Not through `sys.stderr`: a thread that holds its lock when the process ends would abort the
            # process.
            os.write(self._target, "".join(f"{text}\n" for text in kept).encode("utf-8", "replace"))
