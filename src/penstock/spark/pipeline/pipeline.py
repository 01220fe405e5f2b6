"""The life of a pipeline: start, status, stop and end."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.config import Setting
from penstock.errors import ConfigError, Corrupt, PenstockError
from penstock.spark.pipeline.checkpoint import Checkpoint
from penstock.spark.pipeline.decode import SOURCE_COLUMNS, infer_schema, parse_schema
from penstock.spark.pipeline.ledger import BatchLine, Ledger
from penstock.spark.pipeline.microbatch import MicroBatches
from penstock.spark.pipeline.outputs import source_options
from penstock.spark.pipeline.rows import otlp_columns
from penstock.spark.pipeline.spec import PipelineSpec, load_spec, read_spec
from penstock.spark.session.failures import explain_pipeline
from penstock.spark.sources.buffer_options import BufferOptions
from penstock.spark.sources.offsets import Offset, QueueOffsets
from penstock.spark.sources.queues import Backlog, QueueWatch, ReadQueue, bounds_of
from penstock.units import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

_log = logging.getLogger(__name__)
_ORIGIN: Final = "origin.json"
_SCHEMA: Final = "schema.json"
_POLL_S: Final = 0.1
_FOLLOW_S: Final = 1.0


class Pipeline:
    """A pipeline that moves records from a queue, through SQL, into its sinks exactly once.

    pipeline = Pipeline.from_yaml("clicks.yaml")
    run = pipeline.start(build_session("clicks"))
    run.wait()
    """

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec

    @classmethod
    def from_yaml(cls, path: str | Path) -> Pipeline:
        """Read a pipeline from a YAML file. Raise `ConfigError`, naming the key and the closest known one."""
        return cls(load_spec(path))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Setting]) -> Pipeline:
        """Read a pipeline from a mapping. Relative paths are relative to the working directory."""
        return cls(read_spec(mapping))

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.spec.ledger_config)

    def source_options(self) -> BufferOptions:
        """Return the parsed options of the source."""
        return BufferOptions.parse(source_options(self.spec, SOURCE_COLUMNS))

    def schema(self, spark: SparkSession, *, keep: bool = True) -> StructType | None:
        """Return the decoded columns: as configured, or as inferred from a sample at the first start.

        With `keep`, store inferred columns for all later starts. Raise `InvalidInput` if there are no records
        yet.
        """
        decode = self.spec.decode
        if decode.format == "raw":
            return None
        if decode.signal is not None:
            return otlp_columns(decode.signal)
        if decode.schema is not None:
            return parse_schema(decode.schema)
        ledger = self.ledger
        kept = ledger.kept(_SCHEMA)
        if kept is not None and kept.get("format") == decode.format:
            from pyspark.sql.types import StructType

            fields = kept["schema"]
            assert isinstance(fields, dict)
            return StructType.fromJson(fields)
        try:
            schema = infer_schema(spark, decode, self._sample(spark))
        except PenstockError:
            raise
        except Exception as error:
            raise explain_pipeline(error) or error from error
        if keep:
            ledger.keep(_SCHEMA, {"format": decode.format, "schema": schema.jsonValue()})
        return schema

    def _sample(self, spark: SparkSession) -> DataFrame:
        options = source_options(self.spec, ("value",)) | {"mode": "read", "partitions": "1", "onGap": "fail"}
        for name in ("maxBatchesPerTrigger", "maxBytesPerTrigger", "startingOffsets"):
            options.pop(name, None)
        return spark.read.format("penstock-buffer").options(**options).load()

    def start(
        self,
        spark: SparkSession,
        *,
        once: bool = False,
        on_line: Callable[[BatchLine], None] | None = None,
    ) -> RunningPipeline:
        """Start the query. With `once`, it processes the current records and ends.

        `on_line` is called with the line of every finished micro-batch, in a thread of Spark, and must not
        raise or block. Raise `ConfigError`, `InvalidInput` or `Unsupported` for settings that cannot work.
        """
        schema = self.schema(spark)
        checkpoint = self._checkpoint(spark)
        checkpoint.prepare()
        origin = self._begin(checkpoint)
        classic = _is_classic(spark)
        run = RunningPipeline(self, origin, on_line, known=None if classic else self._known(checkpoint))
        batches = MicroBatches(
            self.spec, schema, self.ledger, origin=origin, on_line=run.record if classic else None
        )
        options = source_options(self.spec, SOURCE_COLUMNS) | {"startingOffsets": _as_option(origin)}
        frame = spark.readStream.format("penstock-buffer").options(**options).load()
        writer = (
            frame.writeStream.queryName(self.spec.name)
            .foreachBatch(run.gate(batches.run) if classic else batches.run)
            .option("checkpointLocation", self.spec.checkpoint_path)
        )
        if once:
            writer = writer.trigger(availableNow=True)
        else:
            interval_ms = round(parse_duration(self.spec.trigger.interval) * 1000)
            writer = writer.trigger(processingTime=f"{interval_ms} milliseconds")
        try:
            run.attach(writer.start())
        except Exception as error:
            raise explain_pipeline(error) or error from error
        return run

    def _checkpoint(self, spark: SparkSession) -> Checkpoint:
        """Return the checkpoint. With Spark Connect, read its files through the server."""
        return Checkpoint(self.spec.checkpoint_path, spark, through_spark=not _is_classic(spark))

    def _known(self, checkpoint: Checkpoint) -> int:
        """Return the last micro-batch that had a line before this start, or -1."""
        app = checkpoint.query_id
        return max((line.batch for line in self.ledger.lines(app)), default=-1) if app is not None else -1

    def _begin(self, checkpoint: Checkpoint) -> Offset:
        """Compare the checkpoint with the ledger. Return the start of the first micro-batch."""
        self._check_books(checkpoint)
        return self._origin(checkpoint)

    def _check_books(self, checkpoint: Checkpoint) -> None:
        """Log a warning for finished micro-batches without a line: their rows are stored but not recorded.

        Raise `Corrupt` for a checkpoint that has micro-batches but no query id. Spark would run the last one
        again under a new id, and no sink would recognise it.
        """
        if not checkpoint.is_local:
            return  # it cannot be listed
        app = checkpoint.query_id
        if app is None and (checkpoint.planned() or checkpoint.done()):
            raise Corrupt(
                f"{checkpoint.path}/metadata is missing, but the checkpoint has micro-batches. Restore it: "
                'its one line is {"id": "..."} with the name of the folder in the ledger '
                f"{self.ledger.url} that has this query's lines"
            )
        lost = [] if app is None else self.ledger.without_line(app, checkpoint.done())
        if lost:
            _log.warning(
                "the ledger %s has no line for micro-batches that the checkpoint %s calls done, %d of them"
                " from %d to %d: it was cut, removed or replaced by an older copy. Restore it; until then"
                " `penstock audit` cannot account for these micro-batches",
                self.ledger.url,
                checkpoint.path,
                len(lost),
                lost[0],
                lost[-1],
            )

    def _origin(self, checkpoint: Checkpoint) -> Offset:
        """Return the start of the first micro-batch as numbers, stored for the life of the checkpoint.

        Spark requests it again if it repeats its first micro-batch. `latest` would have moved by then.
        """
        ledger = self.ledger
        started = checkpoint.query_id is not None
        kept = ledger.kept(_ORIGIN)
        if started and kept is not None:
            return {int(shard): int(str(place)) for shard, place in kept.items()}
        if started:
            _log.warning(
                "the ledger %s has lost %s: if the first micro-batch of %s is run again, it may begin at"
                " another position. Restore it",
                ledger.url,
                _ORIGIN,
                checkpoint.path,
            )
        options = self.source_options()
        queue = ReadQueue.open(options, must_exist=False)
        try:
            bounds = bounds_of(queue.look())
        finally:
            queue.close()
        origin = QueueOffsets(options.manifest_path).resolve(
            options.starting, bounds, "source.buffer.starting"
        )
        if not started and options.starting == "earliest":
            self._refuse_repetition(ledger, origin)
        if not started:
            ledger.keep(_ORIGIN, {str(shard): place for shard, place in origin.items()})
        return origin

    def _refuse_repetition(self, ledger: Ledger, origin: Offset) -> None:
        """Raise `ConfigError` if an earlier query has delivered records that are still in the queue."""
        for app in ledger.apps():
            ends = ledger.lines(app)[-1].end
            if any(ends.get(shard, 0) > place for shard, place in origin.items()):
                reached = (
                    ends[0] if list(ends) == [0] else json.dumps({str(n): ends[n] for n in sorted(ends)})
                )
                raise ConfigError(
                    f"the checkpoint {self.spec.checkpoint_path} is new, but an earlier one has delivered "
                    f"everything before {reached} of this queue, and some of it is still there. Restore that "
                    f"checkpoint, or set source.buffer.starting to {reached} to continue after it; to "
                    "deliver everything again into new tables, use another ledger (this one is "
                    f"{ledger.url})"
                )


def _as_option(origin: Mapping[int, int]) -> str:
    return json.dumps({str(shard): origin[shard] for shard in sorted(origin)})


def _is_classic(spark: SparkSession) -> bool:
    return hasattr(spark, "_jsparkSession")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """The status of a running pipeline, for displays. None means that a value is not known yet."""

    active: bool
    busy: bool
    """Whether a micro-batch is running."""
    batch: int | None = None
    """The last finished micro-batch."""
    rows_per_s: float | None = None
    batch_s: float | None = None
    """The duration of the last micro-batch."""
    backlog_batches: int | None = None
    """Undelivered batches in the queue, counted from the queue's end."""
    lag_s: float | None = None
    """The age of the oldest undelivered record, or 0 if there are none."""
    read: int = 0
    """Records read since the start of this process. The next four fields count what they became."""
    dead: int = 0
    skipped: int = 0
    gaps: int = 0
    rows: Mapping[str, int] | None = None
    last_error: str | None = None


class RunningPipeline:
    """A started pipeline. Its methods may be called from any thread.

    `known` is for Spark Connect, which runs the micro-batches in a process of its server. Lines after that
    micro-batch are then read from the ledger.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        origin: Offset,
        on_line: Callable[[BatchLine], None] | None = None,
        *,
        known: int | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._on_line = on_line
        self._origin = origin
        self._query: StreamingQuery | None = None
        self._lock = threading.Lock()
        self._totals = PipelineStatus(active=True, busy=False, rows={})
        self._delivered: Offset | None = None
        self._stopping = threading.Event()
        self._watch: QueueWatch | None = None
        self._watching = threading.Lock()
        self._last_error: str | None = None
        self._ledger = pipeline.ledger
        self._known = known
        self._following = threading.Lock()
        self._follow_at = 0.0
        self._last_before_stop: int | None = None

    def attach(self, query: StreamingQuery) -> None:
        self._query = query

    @property
    def query(self) -> StreamingQuery:
        assert self._query is not None
        return self._query

    def record(self, line: BatchLine) -> None:
        """Add a finished micro-batch to the totals."""
        with self._lock:
            before = self._totals
            rows = dict(before.rows or {})
            for name, count in line.rows.items():
                rows[name] = rows.get(name, 0) + count
            self._delivered = line.end
            self._totals = replace(
                before,
                read=before.read + line.read,
                dead=before.dead + line.dead,
                skipped=before.skipped + line.skipped,
                gaps=before.gaps + line.gaps,
                rows=rows,
            )
        if self._on_line is not None:
            self._on_line(line)

    def gate(self, run: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
        """Return `run` wrapped to start no micro-batch after a request to stop."""

        def gated(frame: DataFrame, batch: int) -> None:
            if self._stopping.is_set():
                # Nothing has been written yet: the batch stays planned and runs at the next start.
                raise _Stopped("the pipeline was requested to stop")
            run(frame, batch)

        return gated

    def follow(self, *, now: bool = False) -> None:
        """Read new lines from the ledger, at most once a second, if Spark does not report them here."""
        with self._following:
            if self._known is None or (not now and time.monotonic() < self._follow_at):
                return
            self._follow_at = time.monotonic() + _FOLLOW_S
            try:
                lines = self._ledger.lines(str(self.query.id), after=self._known)
            except PenstockError as error:  # the pipeline may still be healthy: only its totals are late
                self._last_error = str(error)
                return
            for line in lines:
                self.record(line)
                self._known = line.batch

    def request_stop(self) -> None:
        """Let the running micro-batch finish and start no other. Return immediately; `wait` for the end.

        With Spark Connect, another micro-batch may have started. It is cancelled and runs at the next start.
        """
        self._stopping.set()

    def _may_stop(self) -> bool:
        """Return whether no micro-batch is running or, without a gate, whether the last one is done."""
        if not self.query.status["isTriggerActive"]:
            return True
        if self._known is None:
            return False
        progress = self.query.lastProgress
        last = -1 if progress is None else int(progress["batchId"])
        if self._last_before_stop is None:
            self._last_before_stop = last
        return last != self._last_before_stop

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end. Return True after a normal end, or False after the timeout.

        Raise the error that ended the query, explained in our terms if it is known.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.query.isActive:
            self.follow()
            if self._stopping.is_set() and self._may_stop():
                self.query.stop()
            elif deadline is not None and time.monotonic() >= deadline:
                return False
            else:
                time.sleep(_POLL_S)
        self.follow(now=True)
        self._release()
        error = self.query.exception()
        if error is None or (self._stopping.is_set() and _Stopped.__name__ in str(error)):
            return True
        known = explain_pipeline(error)
        self._last_error = str(known or error)
        raise known or error from error

    def status(self) -> PipelineStatus:
        """Return the current status. It costs one conditional request to the queue."""
        self.follow()
        progress = self.query.lastProgress
        with self._lock:
            totals, delivered = self._totals, self._delivered
        backlog, problem = self._backlog(delivered)
        state = self.query.status
        return replace(
            totals,
            active=self.query.isActive,
            busy=bool(state["isTriggerActive"]) and "Waiting" not in str(state["message"]),
            batch=None if progress is None else int(progress["batchId"]),
            rows_per_s=None if progress is None else float(progress["processedRowsPerSecond"] or 0.0),
            batch_s=None if progress is None else float(progress["batchDuration"]) / 1000,
            backlog_batches=None if backlog is None else backlog.batches,
            lag_s=None if backlog is None else _lag_s(backlog),
            last_error=self._last_error or problem,
        )

    def _backlog(self, delivered: Offset | None) -> tuple[Backlog | None, str | None]:
        try:
            with self._watching:
                if self._watch is None:
                    self._watch = QueueWatch.open(self.pipeline.source_options())
                return self._watch.look(delivered or self._origin), None
        except PenstockError as error:
            return None, str(error)

    def _release(self) -> None:
        """Close the ledger and the queue watch. A later call opens them again."""
        with self._following:
            self._ledger.close()
        with self._watching:
            if self._watch is not None:
                self._watch.close()
                self._watch = None


class _Stopped(Exception):
    """The error that ends a query after a request to stop, before it writes anything."""


def _lag_s(backlog: Backlog) -> float:
    if backlog.oldest_ms is None:
        return 0.0
    return max(0.0, time.time() - backlog.oldest_ms / 1000)
