"""One micro-batch: decode, separate the bad records, write every sink, write the ledger.

Each record reaches each sink exactly once, even after crashes:

1. Spark writes the range of the batch into its checkpoint, then calls `run`. It also stores the range in the
   ledger, and raises if a batch number returns with another range.
2. Every sink is written under (query, batch). A sink that already has the batch does nothing.
3. Bad records go into the dead-letter table in the same way.
4. The line in the ledger is written. Writing it again changes nothing.
5. Spark commits the batch.

After a crash before step 5, Spark runs the batch again with the same range. Steps 2 to 4 are safe to repeat.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import xxhash

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Corrupt
from penstock.spark.pipeline.checkpoint import Checkpoint
from penstock.spark.pipeline.dead_letters import letters_of
from penstock.spark.pipeline.decode import REASON, decode
from penstock.spark.pipeline.ledger import BatchLine, BatchPlan, Ledger
from penstock.spark.pipeline.outputs import Output
from penstock.spark.pipeline.rows import leaves_rows_out, rows_to_write
from penstock.spark.pipeline.spec import PipelineSpec
from penstock.spark.pipeline.transform import (
    Shape,
    analysed_plan,
    apply_transform,
    check_shape,
    shape_of_plan,
)
from penstock.spark.sources.offsets import Offset

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation
    from pyspark.sql.types import StructType

T = TypeVar("T")

OBSERVED_WITHIN_S = 10.0
"""The time to wait for the counts of a finished action. An action that observes nothing never returns any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """The number of rows from the source, of bad rows (including gaps), and of gaps."""

    rows: int
    bad: int
    gaps: int


class MicroBatches:
    """The processor of one query's micro-batches. It is pickled if Spark runs it in another process."""

    def __init__(
        self,
        spec: PipelineSpec,
        schema: StructType | None,
        ledger: Ledger,
        *,
        origin: Mapping[int, int],
        on_line: Callable[[BatchLine], None] | None = None,
    ) -> None:
        self._spec = spec
        self._schema = schema
        self._ledger = ledger
        self._origin = dict(origin)
        self._on_line = on_line
        self._app = ""
        # Merges come last, because their counts are not observed: an earlier sink provides the counts.
        self._outputs = {
            name: Output.of(sink)
            for name, sink in sorted(spec.outputs.items(), key=lambda item: item[1].merge is not None)
        }
        self._letters = None if spec.letters is None else Output.of(spec.letters)
        self._shapes: dict[str, Shape] = {}
        self._left_out: dict[str, int] = {}

    def run(self, frame: DataFrame, batch: int) -> None:
        """Deliver one micro-batch. Raise what Spark, a sink or the ledger raises. Safe to repeat."""
        began_s = SYSTEM_CLOCK.monotonic()
        checkpoint = Checkpoint(self._spec.checkpoint_path, frame.sparkSession)
        if not self._app:
            self._app = _required(checkpoint.query_id, f"{checkpoint.path} does not name a query")
        start, end = self._range(checkpoint, batch)
        counted, counting = self._decoded(frame)
        self._remember_plan(batch, start, end)
        merges = [output.sink.merge is not None for output in self._outputs.values()]
        shared = len(merges) > 1 or any(merges)
        if shared:
            counted = counted.persist()
        try:
            rows = {name: self._write(name, output, counted, batch) for name, output in self._outputs.items()}
            counts = counting.result(frame, counted, observed=not all(merges))
            if counts.gaps or (counts.bad and self._spec.on_error == "dead_letter"):
                self._write_letters(counted, batch)
        finally:
            if shared:
                counted.unpersist()
        line = self._line(batch, start, end, counts, rows, SYSTEM_CLOCK.monotonic() - began_s)
        self._ledger.write(self._app, line)
        if self._on_line is not None:
            self._on_line(line)

    def _remember_plan(self, batch: int, start: Offset, end: Offset) -> None:
        """Raise `Corrupt` if the batch number was used for other records or another decoding. Store the plan.

        Sinks identify a micro-batch by its number only. If the checkpoint was set back and Spark plans the
        number again over other records, sinks would mistake them for a repetition. If the schema has changed,
        a record that was bad when a sink committed the batch may now be good, and no table would have it.
        """
        plan = BatchPlan(batch=batch, start=start, end=end, decoding=self._decoding)
        known = self._ledger.plan(self._app)
        if known is not None and known.batch == batch and known != plan:
            if (known.start, known.end) != (start, end):
                raise Corrupt(
                    f"micro-batch {batch} was planned before as {_spans(known.start, known.end)}, and now as "
                    f"{_spans(start, end)}: the checkpoint {self._spec.checkpoint_path} was set back or is a "
                    "copy. Restore the right one, or start with a new checkpoint and `starting` after "
                    "what `penstock audit` reports as delivered"
                )
            if self._begun(batch):
                raise Corrupt(
                    f"micro-batch {batch} was started with another decode section and has reached a sink: "
                    "complete it with the old one (`penstock run --once`), then change the file"
                )
        if known is not None and known.batch > batch:
            raise Corrupt(
                f"micro-batch {known.batch} was planned before, and now {batch}: the checkpoint "
                f"{self._spec.checkpoint_path} was set back, is a copy, or is in use twice. Restore the "
                "right one"
            )
        if known != plan:
            self._ledger.write_plan(self._app, plan)

    @property
    def _decoding(self) -> str:
        decode = self._spec.decode
        schema = "" if self._schema is None else self._schema.json()
        return xxhash.xxh3_64_hexdigest(
            repr((decode.format, sorted(decode.options.items()), schema)).encode()
        )

    def _begun(self, batch: int) -> bool:
        """Return whether any sink has the micro-batch."""
        outputs = [*self._outputs.values(), *([self._letters] if self._letters else [])]
        return any(output.last_version(self._app) == batch for output in outputs)

    def _range(self, checkpoint: Checkpoint, batch: int) -> tuple[Offset, Offset]:
        end = checkpoint.offset(batch)
        before = checkpoint.offset(batch - 1) if batch > 0 else None
        end_offset = _plain_offset(_required(end, f"{checkpoint.path} has no plan for micro-batch {batch}"))
        return (self._origin if before is None else _plain_offset(before)), end_offset

    def _decoded(self, frame: DataFrame) -> tuple[DataFrame, _Counting]:
        """Return the decoded frame, and a counter that counts its rows in the same pass."""
        counting = _Counting()
        decoded = decode(counting.before(frame), self._spec.decode, self._schema)
        if self._spec.on_error == "fail":
            decoded = decoded.withColumn(REASON, _fail_on_bad())
        return counting.after(decoded), counting

    def _write(self, name: str, output: Output, counted: DataFrame, batch: int) -> int:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        sink = output.sink
        transformed = apply_transform(counted.filter(F.col(REASON).isNull()), self._spec, sink)
        if name not in self._shapes:
            self._shapes[name] = shape_of_plan(analysed_plan(transformed))
            check_shape(name, sink, self._shapes[name])
        if sink.merge is not None:
            return self._merge(output, transformed, batch)
        counted_rows = F.count(F.lit(1)).alias("rows")
        given, observation = Observation(), Observation()
        if leaves_rows_out(sink):
            transformed = transformed.observe(given, counted_rows)
        written = rows_to_write(sink, transformed)
        output.save(written.observe(observation, counted_rows), self._app, batch)
        found = _observed(observation)
        rows = written.count() if found is None else found["rows"]
        if leaves_rows_out(sink):
            found = _observed(given)
            self._left_out[name] = (transformed.count() if found is None else found["rows"]) - rows
        return rows

    def _merge(self, output: Output, transformed: DataFrame, batch: int) -> int:
        from penstock.spark.tables.merge import merge_into

        table, merge = output.table, output.sink.merge
        assert table is not None
        assert merge is not None
        rows = transformed.toArrow()
        merge_into(table, rows, keys=merge.keys, add=merge.add, app=self._app, version=batch)
        return int(rows.num_rows)

    def _write_letters(self, counted: DataFrame, batch: int) -> None:
        assert self._letters is not None
        letters = letters_of(counted, self._spec.name, batch, gaps_only=self._spec.on_error != "dead_letter")
        self._letters.save(letters, self._app, batch)

    def _line(
        self,
        batch: int,
        start: Offset,
        end: Offset,
        counts: BatchCounts,
        rows: dict[str, int],
        took_s: float,
    ) -> BatchLine:
        bad = counts.bad - counts.gaps
        dead = bad if self._spec.on_error == "dead_letter" else 0
        return BatchLine(
            batch=batch,
            start=start,
            end=end,
            read=counts.rows - counts.gaps,
            dead=dead,
            skipped=bad - dead,
            gaps=counts.gaps,
            rows=rows,
            one_to_one={name: shape is Shape.ONE_TO_ONE for name, shape in self._shapes.items()},
            left_out={name: count for name, count in self._left_out.items() if count},
            at_ms=SYSTEM_CLOCK.now_ms(),
            took_ms=max(1, round(took_s * 1000)),
        )


def _observed(observation: Observation) -> dict[str, int] | None:
    """Return the counts of an observation, or None if there are none.

    Spark omits parts of a plan that it knows to return no rows, before or during the run. Its Python side
    then fails on the empty result. An action that observes nothing never returns a result.
    """
    results: queue.SimpleQueue[dict[str, int] | None] = queue.SimpleQueue()

    def fetch() -> None:
        try:
            results.put({name: int(count) for name, count in observation.get.items()} or None)
        except Exception:  # noqa: BLE001  after any failure the caller counts the rows itself
            results.put(None)

    threading.Thread(target=fetch, name="penstock-observation", daemon=True).start()
    try:
        return results.get(timeout=OBSERVED_WITHIN_S)
    except queue.Empty:
        return None


class _Counting:
    """A counter of rows as they pass: before the decoder, where a row is a record or a gap, and after it."""

    def __init__(self) -> None:
        from pyspark.sql import Observation

        self._read = Observation()
        self._decoded = Observation()

    def before(self, frame: DataFrame) -> DataFrame:
        return frame.observe(self._read, *self._of_source())

    def after(self, decoded: DataFrame) -> DataFrame:
        return decoded.observe(self._decoded, *self._of_decoded())

    def result(self, frame: DataFrame, decoded: DataFrame, *, observed: bool) -> BatchCounts:
        """Return the counts after a sink was written. `observed` says whether its action was observed."""
        found = _observed(self._read) if observed else None
        found = found or frame.agg(*self._of_source()).collect()[0].asDict()
        bad = _observed(self._decoded) if observed else None
        bad = bad or decoded.agg(*self._of_decoded()).collect()[0].asDict()
        return BatchCounts(rows=int(found["rows"]), bad=int(bad["bad"]), gaps=int(found["gaps"]))

    def _of_source(self) -> list[Column]:
        from pyspark.sql import functions as F

        gaps = F.count(F.when(F.col("index") < 0, 1)).alias("gaps")
        return [F.count(F.lit(1)).alias("rows"), gaps]

    def _of_decoded(self) -> list[Column]:
        from pyspark.sql import functions as F

        return [F.count(F.col(REASON)).alias("bad")]


def _fail_on_bad() -> Column:
    from pyspark.sql import functions as F

    sentence = F.concat(
        F.lit("BadRecord: record "), F.col("_index"), F.lit(" of sequence "), F.col("_sequence"),
        F.lit(" in shard "), F.col("_shard"), F.lit(" "), F.col(REASON),
    )  # fmt: skip
    keep = F.col(REASON).isNull() | (F.col("_index") < 0)
    return F.when(keep, F.col(REASON)).otherwise(F.raise_error(sentence).cast("string"))


def _spans(start: Mapping[int, int], end: Mapping[int, int]) -> str:
    return ", ".join(f"{start.get(shard, 0)} to {end[shard] - 1} of shard {shard}" for shard in sorted(end))


def _plain_offset(stored: Mapping[str, object]) -> Offset:
    """Return a map of shards to sequences, without the marks of the offset."""
    return {int(key): value for key, value in stored.items() if key.isdecimal() and isinstance(value, int)}


def _required(value: T | None, problem: str) -> T:
    if value is None:
        raise Corrupt(f"{problem}: the checkpoint is damaged or was moved while the pipeline was running")
    return value
