"""A Spark session with suitable settings for streams of small batches.

| setting | reason |
|---|---|
| Unix sockets to the Python workers | every Python task is about 40 ms faster |
| timezone UTC | `ingestion_time` is the same on every machine |
| local: plain-rename checkpoint files | half of a micro-batch's fixed cost; see below |
| local: few shuffle partitions, no UI, loopback only | a single machine needs less than a cluster |
| quiet logs | warnings of Spark, errors of everything else |

The plain-rename checkpoint manager does not create files atomically "if absent". Two drivers that run on one
checkpoint at the same time could both commit a batch. The buffer's fencing stops the older driver before
that. A local query that reads from another source must not be started twice. The setting is never used for a
cluster.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError, Unsupported
from penstock.spark.session.java import ensure_java
from penstock.spark.session.java_process import JavaOutput, forget_java, java_ending, launch_java, not_ready

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER: Final = "local[*]"
LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")

SPARK_MIN: Final = (4, 2)
"""The first release of Spark in which Python sources can limit a micro-batch."""
_DYING_S: Final = 10.0
"""The time for a Java with broken connections to end: it may still run its shutdown hooks."""
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_CHECKPOINTS: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)


def check_spark(version: str | None = None) -> None:
    """Raise `Unsupported` unless PySpark, or `version`, is new enough for the sources."""
    if version is None:
        try:
            import pyspark
        except ImportError as error:
            raise Unsupported("PySpark is not installed; run `pip install 'penstock[spark]'`") from error
        version = pyspark.__version__
    numbers = re.findall(r"\d+", version)[:2]
    if tuple(map(int, numbers)) < SPARK_MIN:
        least = ".".join(map(str, SPARK_MIN))
        raise Unsupported(f"Spark {version} is too old for Penstock; install pyspark {least} or newer")


def register(spark: SparkSession) -> None:
    """Register Penstock's formats with `spark`. Safe to repeat.

    They are `penstock-buffer`, `penstock-quiver`, the tables `penstock-delta`, `penstock-parquet` and
    `penstock-iceberg`, the databases `penstock-timeseries` and `penstock-vector`, and, if `penstock[topics]`
    is installed, `penstock-topic`.

    Executors need Penstock in their own Python environment. Raise `Unsupported` if the session's Spark is too
    old.
    """
    check_spark()
    check_spark(spark.version)
    from penstock.spark.sinks.buffer import BufferFormat
    from penstock.spark.sinks.databases import TimeSeriesFormat, VectorFormat
    from penstock.spark.sources.quiver import QuiverFormat
    from penstock.spark.tables.format import DeltaFormat, IcebergFormat, ParquetFormat

    tables = (DeltaFormat, ParquetFormat, IcebergFormat)
    for source in (BufferFormat, QuiverFormat, *tables, TimeSeriesFormat, VectorFormat):
        spark.dataSource.register(source)
    if importlib.util.find_spec("httpx") is not None:
        from penstock.spark.sinks.topic import TopicFormat

        spark.dataSource.register(TopicFormat)


def is_local(master: str) -> bool:
    """Return whether executors are threads of the driver."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def session_settings(master: str | None, conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings for a session that this process starts: the defaults, overridden by `conf`."""
    settings = {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.showConsoleProgress": "false",
    }
    if master is not None and is_local(master):
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": str(_local_cores(master)),
            "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
        }
    settings |= conf
    java_options = settings.get(_JAVA_OPTIONS, "")
    if "log4j2.configurationFile" not in java_options:
        quiet = f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}"
        settings[_JAVA_OPTIONS] = f"{java_options} {quiet}".strip()
    return settings


def _local_cores(master: str) -> int:
    match = re.match(r"local\[(\d+)", master)
    if match is not None:
        return max(1, int(match[1]))
    return os.cpu_count() or 1 if master.startswith("local[") else 1


def build_session(
    app_name: str,
    *,
    master: str | None = None,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
    java_output: JavaOutput | None = None,
) -> SparkSession:
    """Return a session that has Penstock's formats.

    Without `master` and `remote`, this is the active session, or else the one that `spark-submit` or
    `SPARK_REMOTE` requests, or else a new one on `local[*]`. `remote` is the address of a Spark Connect
    server (`sc://host:port`). `conf` overrides the defaults of `session_settings`. `java_output` receives the
    standard error of a Java that this call starts, line by line, in a separate thread. Without it, Java
    shares the standard error of this process.

    Raise `ConfigError` if a session on another master is active, `Unsupported` if Java or PySpark is missing,
    too old or rejects a setting, or `Unavailable` if Java was killed before Spark was ready; the call may
    succeed if it is repeated.
    """
    if master is not None and remote is not None:
        raise ConfigError("give a master or a remote, not both")
    check_spark()
    from pyspark.sql import SparkSession

    overrides = dict(conf or {})
    remote = remote or (None if master else os.environ.get("SPARK_REMOTE"))
    active = SparkSession.getActiveSession()
    if active is not None and master is None and remote is None:
        spark = active
    elif remote is not None:
        spark = _connect(app_name, remote, overrides)
    else:
        _refuse_other_master(active, master)
        spark = _start(app_name, master, overrides, java_output)
    register(spark)
    return spark


def _connect(app_name: str, remote: str, conf: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    if not remote.startswith(("sc://", "local")):
        raise ConfigError(
            f"remote: expected the address of a Spark Connect server, sc://host, found {remote!r}"
        )
    # The other defaults are fixed when the server starts; setting them from a client only logs warnings.
    settings = {"spark.sql.session.timeZone": "UTC"} | dict(conf)
    if remote.startswith("local"):  # a server in this process's own Java
        ensure_java()
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name).remote(remote)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _refuse_other_master(active: SparkSession | None, master: str | None) -> None:
    from pyspark.sql.utils import is_remote

    if active is None or master is None or is_remote():
        return
    current = active.sparkContext.master
    if current != master:
        raise ConfigError(
            f"a session on {current} is active in this process; stop it before requesting {master}"
        )


def _start(
    app_name: str, master: str | None, conf: Mapping[str, str], java_output: JavaOutput | None
) -> SparkSession:
    from pyspark.sql import SparkSession

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit has started Java and chosen a master
    if master is None and not submitted:
        master = conf.get("spark.master", DEFAULT_MASTER)
    if not submitted:
        ensure_java()
    if master is not None and is_local(master):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings = {"spark.app.name": app_name} | ({} if master is None else {"spark.master": master})
    settings |= session_settings(master, conf)
    if not submitted:
        launch_java(settings, java_output)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except Exception as error:
        ending = java_ending(_DYING_S if _is_lost() else 0.0)
        if ending is None:
            raise
        forget_java(None)
        raise not_ready(ending, ()) from error


def _is_lost() -> bool:
    """Return whether Java no longer responds. Its process may need a moment to end."""
    from pyspark import SparkContext

    try:
        jvm = SparkContext._jvm
        assert jvm is not None
        return not jvm.java.lang.System.currentTimeMillis()
    except Exception:  # noqa: BLE001 - whatever the bridge raises then
        return True
