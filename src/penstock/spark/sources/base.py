"""The stream reader of every source: offsets, limits and the plan of a micro-batch, in one order.

A source adds its bounds, the marks of what it has read, and its partitions. Spark calls the reader in a
process of its own, one for each query, and ships copies of it to the tasks.
"""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import ConfigError
from penstock.spark.sources.columns import KnownColumns, spark_schema
from penstock.spark.sources.offsets import (
    Bounds,
    K,
    M,
    Offsets,
    Place,
    StoredOffset,
    admit,
    backlog,
    following_of,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")


class SourceStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow, Generic[K, M]):
    """Plans the micro-batches of one query. Raises the `gap` of its offsets where records are missing.

    `arguments` are those of the subclass, which a task's copy is made from: nothing that is open travels.
    """

    def __init__(
        self,
        offsets: Offsets[K, M],
        starting: Place | Mapping[K, Place],
        per_trigger: int,
        unit: str,
        arguments: tuple[object, ...],
    ) -> None:
        self._offsets: Offsets[K, M] = offsets
        self._starting: Place | Mapping[K, Place] = starting
        self._per_trigger = per_trigger
        self._unit = unit
        self._arguments = arguments
        self._seen: Mapping[K, Bounds] = {}
        self._target: dict[K, int] | None = None

    def __reduce__(self) -> tuple[type[SourceStreamReader[K, M]], tuple[object, ...]]:
        return type(self), self._arguments

    @abstractmethod
    def _look(self) -> Mapping[K, Bounds]:
        """Read what the source holds now."""

    @abstractmethod
    def _accept(self, numbers: dict[K, int], marks: Mapping[K, M]) -> dict[K, int]:
        """Return an offset's numbers, checked against what `_look` has seen. Raises a gap if the offset is of
        another source."""

    @abstractmethod
    def _mark(self, key: K, number: int) -> M | None:
        """Return the mark of the entry just before `number`; None if it is not known."""

    @abstractmethod
    def _plan(self, start: dict[K, int], end: dict[K, int], marks: Mapping[K, M]) -> list[InputPartition]:
        """Return the tasks between two offsets; `marks` are those of `start`."""

    def _check_gaps(self, start: dict[K, int], end: dict[K, int]) -> None:
        """Raise a gap, or warn, if entries between two offsets are missing."""

    def _admit(self, start: dict[K, int], end: dict[K, int], limit: int) -> dict[K, int]:
        """Return the end of a micro-batch of at most `limit` entries."""
        return admit(start, end, limit)

    def _marks(self, end: Mapping[K, int], start: Mapping[K, int], known: Mapping[K, M]) -> dict[K, M]:
        """Return the marks at `end`; those of keys that have not moved since `start` stay."""
        marks = {key: mark for key, mark in known.items() if key in start and end.get(key) == start[key]}
        for key, number in end.items():
            if key not in marks and (mark := self._mark(key, number)) is not None:
                marks[key] = mark
        return marks

    def _refresh(self) -> Mapping[K, Bounds]:
        self._seen = self._look()
        return self._seen

    def initialOffset(self) -> StoredOffset:
        """Return where `startingOffsets` points now. Spark calls this at every start until the first
        micro-batch is done."""
        bounds = self._refresh()
        start = self._start(bounds)
        return self._offsets.write(start, self._marks(start, {}, {}))

    def _start(self, bounds: Mapping[K, Bounds]) -> dict[K, int]:
        start = self._offsets.resolve(self._starting, bounds, "startingOffsets")
        self._offsets.check_asked(start, bounds, "startingOffsets")
        return start

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch, in the source's own unit."""
        return ReadMaxRows(self._per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end: records that arrive later are for the next run."""
        self._target = following_of(self._refresh())

    def latestOffset(self, start: StoredOffset, limit: ReadLimit) -> StoredOffset:
        """Return the end of the next micro-batch, or `start` itself if there is nothing new."""
        numbers, known = self._offsets.read(start)
        bounds = self._refresh()
        here = self._accept(numbers, known)
        available = self._available(here, bounds)
        # Entries that have left the source are not counted and are passed in one step.
        begin = {
            key: min(max(number, bounds[key].first), available[key]) if key in bounds else number
            for key, number in here.items()
        }
        end = available
        if not isinstance(limit, ReadAllAvailable):
            reachable = {key: available[key] for key in begin}
            end = available | self._admit(begin, reachable, self._most(limit))
        self._check_gaps(here, end)
        if end == here:
            return start
        left = backlog(end, following_of(bounds))
        _log.info("next micro-batch: %d %s, %d left", backlog(begin, end), self._unit, left)
        return self._offsets.write(end, self._marks(end, here, known))

    def _available(self, here: Mapping[K, int], bounds: Mapping[K, Bounds]) -> dict[K, int]:
        """Return the end of every key, which `prepareForTriggerAvailableNow` may have fixed.

        A key that is new enters at its first entry, and is read from the next micro-batch on: so every range
        of every micro-batch is in the checkpoint.
        """
        ends = following_of(bounds)
        if (target := self._target) is not None:
            ends = {key: min(number, target[key]) for key, number in ends.items() if key in target}
        entering = {key: bounds[key].first for key in ends if key not in here}
        return {key: max(number, ends.get(key, number)) for key, number in here.items()} | entering

    def _most(self, limit: ReadLimit) -> int:
        if isinstance(limit, ReadMaxRows):
            return limit.max_rows
        return limit.max_files if isinstance(limit, ReadMaxFiles) else self._per_trigger

    def reportLatestOffset(self) -> StoredOffset | None:
        """Return the end of the source for the query's progress: less `endOffset` it is the backlog."""
        return self._offsets.write(following_of(self._seen)) if self._seen else None

    def partitions(self, start: StoredOffset, end: StoredOffset) -> list[InputPartition]:
        """Return the tasks between two offsets: the same after every restart."""
        begin, known = self._offsets.read(start)
        until, reached = self._offsets.read(end)
        self._refresh()
        begin, until = self._accept(begin, known), self._accept_end(until, reached)
        self._offsets.check_order(begin, until)
        self._check_gaps(begin, until)
        return self._plan(begin, until, known)

    def _accept_end(self, numbers: dict[K, int], marks: Mapping[K, M]) -> dict[K, int]:
        return self._accept(numbers, marks)


def runs_of(pieces: Sequence[T], tasks: int) -> list[Sequence[T]]:
    """Divide pieces into at most `tasks` runs of neighbours, none empty, of almost equal lengths."""
    count = min(tasks, len(pieces))
    edges = [len(pieces) * number // count for number in range(count + 1)] if count else [0]
    return [pieces[low:high] for low, high in itertools.pairwise(edges)]


def check_schema(
    schema: StructType, columns: Sequence[str], known: KnownColumns, format_name: str, advice: str
) -> None:
    """Raise `ConfigError` if the user gave another schema than that of the chosen columns."""
    given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
    if given != [(name, known[name][0]) for name in columns]:
        raise ConfigError(
            f"{format_name} has the schema {spark_schema(columns, known)!r}; choose columns with the option "
            f"'columns' and {advice} in the query, instead of giving another schema"
        )
