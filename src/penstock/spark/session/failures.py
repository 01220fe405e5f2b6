"""Explanations of the exceptions that Spark raises.

An error of ours that passes through Spark becomes another class, with the Python traceback, the Java stack
and the query plan around the one useful sentence. `explain` finds that sentence. It also translates faults of
an installation that Spark reports in its own messages.

It reads text, so it works for the classic API and for Spark Connect. Only for a Java that did not start, it
also reads the exit status (`penstock.spark.session.java_process`). From that text it repeats only our own
sentences, module names, versions, and paths without their credentials.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import penstock
from penstock.errors import (
    ConfigError,
    Fenced,
    PenstockError,
    StorageFull,
    Unavailable,
    Unsupported,
)
from penstock.spark.errors import BadRecord, TransformError
from penstock.spark.session.java_process import ending_in, not_ready

_NOT_STARTED: Final = re.compile(r"\[JAVA_GATEWAY_EXITED\]|\[JAVA_GATEWAY_PORT_FAILED\]")
_PLAN: Final = "=== Streaming Query ==="
"""The heading of the query plan, which contains the options of every source and is never useful here."""

_OURS: Final = re.compile(
    r"""^[ |+]*(?P<module>penstock(?:\.\w+)*)\.(?P<name>[A-Z]\w*)(?::[ ](?P<message>.*?))?
    (?=\n\s*SQLSTATE:|\n\tat[ ]|\n[ |+]*\n|\nJVM[ ]stacktrace|\Z)""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_SQL_STATE: Final = re.compile(r"(\s+SQLSTATE: \w+)+\s*\Z")
_CREDENTIALS: Final = re.compile(r"//[^/@\s]*@")

_BAD: Final = re.compile(r"BadRecord: (record -?\d+ of sequence \d+ in shard \d+ .*?)(?: SQLSTATE|\n|$)")
_SQL: Final = re.compile(
    r"\[((?:UNRESOLVED|PARSE|DATATYPE_MISMATCH|TABLE_OR_VIEW|MISSING|AMBIGUOUS|INVALID|UNSUPPORTED)[A-Z_.]*)\]"
    r" (.*?)(?: SQLSTATE|;\n|\n|$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Symptom:
    pattern: re.Pattern[str]
    kind: type[PenstockError]
    sentence: str
    """The message. `{0}` and `{1}` are the groups of the pattern."""


def _symptom(pattern: str, kind: type[PenstockError], sentence: str) -> _Symptom:
    return _Symptom(pattern=re.compile(pattern), kind=kind, sentence=sentence)


_SAME_QUERY: Final = (
    "Run the query that created the checkpoint, or start the changed one with a new checkpoint"
)
_NO_OBJECT_STORE: Final = (
    "the Spark that pip installs comes without it. Put the checkpoint on a local or shared disk "
    "(file:///...), or add the matching hadoop jars; the queue and the tables may stay in the object store"
)
_NOT_WRITABLE: Final = (
    "Spark cannot write to {0}. If that is the checkpoint, give a directory that the driver and, on a "
    "cluster, every worker may create and write"
)

_SYMPTOMS: Final = (
    _symptom(
        r"ModuleNotFoundError: No module named '(penstock)[.\w]*'",
        Unsupported,
        "executors cannot import {0}: install the same version, "
        + penstock.__version__
        + ", in the Python of "
        "every worker and of the driver. spark.pyspark.python (or PYSPARK_PYTHON) says which Python that is",
    ),
    _symptom(
        r"ModuleNotFoundError: No module named '(\w+)[.\w]*'",
        Unsupported,
        "executors cannot import {0}: install the same packages in the Python of every worker as on the "
        "driver (`pip install 'penstock[spark]'` brings those that Penstock needs). spark.pyspark.python (or "
        "PYSPARK_PYTHON) says which Python that is",
    ),
    _symptom(
        r"\[(?:PACKAGE_NOT_INSTALLED|UNSUPPORTED_PACKAGE_VERSION)\] (\S+)",
        Unsupported,
        "the Python of a worker or of the driver has no {0}, or a version that is too old: run "
        "`pip install 'penstock[spark]'` in every Python that spark.pyspark.python names",
    ),
    _symptom(
        r"(?:cannot import name|Can't get attribute) '(\w+)' (?:from|on <module) '(penstock[.\w]*)'",
        Unsupported,
        "{1} on the workers has no {0}: their version of Penstock differs from the driver's. Install "
        + penstock.__version__
        + " in the Python of every worker (spark.pyspark.python), and restart them",
    ),
    _symptom(
        r"DATA_SOURCE_NOT_FOUND\][^:]*: \W?(penstock-\w+)",
        Unsupported,
        "Spark does not know the format {0} in this session: call penstock.spark.register(spark) first, or "
        "use build_session. penstock-topic also needs `pip install 'penstock[topics]'`",
    ),
    _symptom(
        r"Python in worker has different version: ([\d.]+) than that in driver: ([\d.]+)",
        Unsupported,
        "the workers run Python {0}, the driver runs {1}, and Spark needs the same minor version: set "
        "spark.pyspark.python (or PYSPARK_PYTHON) to a Python {1} that has Penstock",
    ),
    _symptom(
        r'Cannot run program "([^"]*python[^"]*)"',
        Unsupported,
        "Spark cannot start {0} as the Python of its workers: set spark.pyspark.python (or PYSPARK_PYTHON) "
        "to one that exists on every worker and has Penstock",
    ),
    _symptom(
        r"UnsupportedLogVersion|INVALID_LOG_VERSION",
        Unsupported,
        "the checkpoint was written by a newer Spark than this one: upgrade Spark, or start with a new "
        "checkpoint",
    ),
    _symptom(
        r"There are \[(\d+)\] sources in the checkpoint offsets and now there are \[(\d+)\] sources",
        ConfigError,
        "the checkpoint belongs to another query, which has {0} sources instead of {1}. " + _SAME_QUERY,
    ),
    _symptom(
        r"\[(STATE_STORE_\w*SCHEMA\w*|STREAMING_STATEFUL_OPERATOR_\w+)",
        ConfigError,
        "the checkpoint belongs to a query that aggregates or joins in another way ({0}). " + _SAME_QUERY,
    ),
    _symptom(
        r"For input string: \"\{|\[INVALID_OFFSET|does not match the (?:source|offset)",
        ConfigError,
        "the checkpoint belongs to a query with another kind of source. " + _SAME_QUERY,
    ),
    _symptom(
        r"CONCURRENT_STREAM_LOG_UPDATE|CONCURRENT_QUERY|another query with same id is already active",
        Fenced,
        "another query runs on the same checkpoint: stop one of the two, and give each query its own "
        "checkpoint",
    ),
    _symptom(
        r'No FileSystem for scheme "?([\w+.-]+)',
        Unsupported,
        "Spark has no file system for {0}://: " + _NO_OBJECT_STORE,
    ),
    _symptom(
        r"Class org\.apache\.hadoop\.fs\.(\w+)\.\w+ not found",
        Unsupported,
        "Spark has no file system for {0}://: " + _NO_OBJECT_STORE,
    ),
    _symptom(
        r"No space left on device",
        StorageFull,
        "a disk that Spark writes to is full: make room for the checkpoint and for spark.local.dir",
    ),
    _symptom(r"Mkdirs failed to create (\S+)", ConfigError, _NOT_WRITABLE),
    _symptom(r"mkdir of (\S+) failed", ConfigError, _NOT_WRITABLE),
    _symptom(r"Destination exists and is not a directory: (\S+)", ConfigError, _NOT_WRITABLE),
    _symptom(
        r"FileNotFoundException: (\S+) \((?:Permission denied|Read-only file system)\)",
        ConfigError,
        _NOT_WRITABLE,
    ),
    _symptom(r"AccessDeniedException: (\S+)", ConfigError, _NOT_WRITABLE),
    _symptom(
        r"Python worker failed to connect back|waiting for the Python worker to connect back",
        Unavailable,
        "Spark waits ten seconds for a Python worker to start, but one took longer: the machine is too busy. "
        "Start again; if this persists, give Spark fewer cores, such as local[2]",
    ),
    _symptom(
        r"Python worker exited unexpectedly",
        Unavailable,
        "a Python worker died during a task, most often because the system had no memory left and killed "
        "it: lower maxBatchesPerTrigger or set maxBytesPerTrigger, or give the workers more memory. "
        "spark.python.worker.faulthandler.enabled=true shows where a crash happens",
    ),
    _symptom(
        r"java\.lang\.OutOfMemoryError",
        Unavailable,
        "Spark's Java ran out of memory: raise spark.driver.memory (spark.executor.memory on a cluster), or "
        "lower maxBatchesPerTrigger or set maxBytesPerTrigger",
    ),
    _symptom(
        r"All masters are unresponsive|Cannot call methods on a stopped SparkContext|"
        r"SparkContext was shut down",
        Unavailable,
        "the Spark session has ended: the master did not respond, or the application was stopped there. "
        "Check that the address of the master is right, that it runs, and that driver and workers reach each "
        "other",
    ),
    _symptom(
        r"StatusCode\.UNAVAILABLE|RETRIES_EXCEEDED",
        Unavailable,
        "the Spark Connect server does not respond: check the address of the remote and that the server runs",
    ),
    _symptom(
        r"Py4JNetworkError|Answer from Java side is empty|Error while sending or receiving",
        Unavailable,
        "Spark's Java ended while it was working: its log or the system's shows the reason (out of memory, "
        "or killed). Start again with the same checkpoint",
    ),
    _symptom(
        r"java\.net\.(?:ConnectException|UnknownHostException|NoRouteToHostException)",
        Unavailable,
        "Spark could not connect to a machine that it needs: check the address of the master and of the "
        "checkpoint's file system, and that driver and workers reach each other",
    ),
)


def explain(error: BaseException) -> PenstockError | None:
    """Return the error as one of ours, or None if it is unknown.

    An error of ours anywhere in the chain takes precedence over the known faults of an installation. Raise
    the result `from error` to keep the details.
    """
    texts: list[str] = []
    for link in _chain(error):
        text = _text(link)
        ours = link if isinstance(link, PenstockError) else _own_error(text)
        if ours is not None:
            return ours
        if _NOT_STARTED.search(text):
            return not_ready(ending_in(link), None)
        texts.append(text)
    for symptom in _SYMPTOMS:
        for found in filter(None, map(symptom.pattern.search, texts)):
            groups = [_CREDENTIALS.sub("//***@", group or "") for group in found.groups()]
            return symptom.kind(symptom.sentence.format(*groups))
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and then its causes, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _text(error: BaseException) -> str:
    """Return the error's message without the query plan. For an error of py4j, put its class name first."""
    message = ""
    with contextlib.suppress(Exception):  # reading a Java error needs the Java process, which may have ended
        message = str(error).partition(_PLAN)[0]
    kind = type(error)
    return f"{kind.__name__}: {message}" if kind.__module__.startswith("py4j") else message


def _own_error(text: str) -> PenstockError | None:
    """Return the last error of ours in a text, or None. Tracebacks print causes first."""
    matches = list(_OURS.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    kind = _class_of(last["module"], last["name"])
    message = _SQL_STATE.sub("", last["message"] or "").strip()
    try:
        return kind(message or last["name"])
    except TypeError:  # it has more parameters than a message
        return PenstockError(message or last["name"])


def _class_of(module: str, name: str) -> type[PenstockError]:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        found = None
    return found if isinstance(found, type) and issubclass(found, PenstockError) else PenstockError


def explain_pipeline(error: BaseException) -> PenstockError | None:
    """Return the error of ours in an exception of a running pipeline, or None if it is unknown."""
    text = str(error)
    bad = _BAD.search(text)
    if bad is not None:
        return BadRecord(
            f"{bad[1]}. Nothing of its micro-batch was written; on_error: dead_letter stores bad records "
            "in a table and continues"
        )
    known = explain(error)
    if known is not None:
        return known
    sql = _SQL.search(text)
    return TransformError(f"transform: {sql[2]} ({sql[1]})") if sql is not None else None
