"""The stream reader that all sources share: offsets, limits and the plan of a micro-batch.

A source adds its bounds, the marks of the entries it has read, and its partitions. Spark calls the reader in
a separate process for each query and sends copies of it to the tasks.
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
    """The planner of one query's micro-batches. It raises the `gap` of its offsets if records are missing.

    `arguments` are the constructor arguments of the subclass. A task's copy is built from them, so open
    handles are not pickled.
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
        """Return the current bounds of the source, read from it."""

    @abstractmethod
    def _accept(self, numbers: dict[K, int], marks: Mapping[K, M]) -> dict[K, int]:
        """Return an offset's numbers, checked against the bounds that `_look` read.

        Raise `gap` if the offset belongs to another source.
        """

    @abstractmethod
    def _mark(self, key: K, number: int) -> M | None:
        """Return the mark of the entry just before `number`, or None if it is unknown."""

    @abstractmethod
    def _plan(self, start: dict[K, int], end: dict[K, int], marks: Mapping[K, M]) -> list[InputPartition]:
        """Return the tasks for the range between two offsets. `marks` are those of `start`."""

    def _check_gaps(self, start: dict[K, int], end: dict[K, int]) -> None:
        """Raise `gap`, or log a warning, if entries between two offsets are missing."""

    def _admit(self, start: dict[K, int], end: dict[K, int], limit: int) -> dict[K, int]:
        """Return the end of a micro-batch of at most `limit` entries."""
        return admit(start, end, limit)

    def _marks(self, end: Mapping[K, int], start: Mapping[K, int], known: Mapping[K, M]) -> dict[K, M]:
        """Return the marks at `end`. Keep the known marks of keys that have not moved since `start`."""
        marks = {key: mark for key, mark in known.items() if key in start and end.get(key) == start[key]}
        for key, number in end.items():
            if key not in marks and (mark := self._mark(key, number)) is not None:
                marks[key] = mark
        return marks

    def _refresh(self) -> Mapping[K, Bounds]:
        self._seen = self._look()
        return self._seen

    def initialOffset(self) -> StoredOffset:
        """Return the current position of `startingOffsets`.

        Spark calls this at every start until the first micro-batch is complete.
        """
        bounds = self._refresh()
        start = self._start(bounds)
        return self._offsets.write(start, self._marks(start, {}, {}))

    def _start(self, bounds: Mapping[K, Bounds]) -> dict[K, int]:
        start = self._offsets.resolve(self._starting, bounds, "startingOffsets")
        self._offsets.check_requested(start, bounds, "startingOffsets")
        return start

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch, in the unit of the source."""
        return ReadMaxRows(self._per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of this run. Later records are left for the next run."""
        self._target = following_of(self._refresh())

    def latestOffset(self, start: StoredOffset, limit: ReadLimit) -> StoredOffset:
        """Return the end of the next micro-batch, or `start` itself if nothing is new."""
        numbers, known = self._offsets.read(start)
        bounds = self._refresh()
        here = self._accept(numbers, known)
        available = self._available(here, bounds)
        # Entries that have left the source do not count towards the limit and are skipped in one step.
        begin = {
            key: min(max(number, bounds[key].first), available[key]) if key in bounds else number
            for key, number in here.items()
        }
        end = available
        if not isinstance(limit, ReadAllAvailable):
            reachable = {key: available[key] for key in begin}
            end = available | self._admit(begin, reachable, self._entries_max(limit))
        self._check_gaps(here, end)
        if end == here:
            return start
        left = backlog(end, following_of(bounds))
        _log.info("next micro-batch: %d %s, %d left", backlog(begin, end), self._unit, left)
        return self._offsets.write(end, self._marks(end, here, known))

    def _available(self, here: Mapping[K, int], bounds: Mapping[K, Bounds]) -> dict[K, int]:
        """Return the end of every key, capped at the end that `prepareForTriggerAvailableNow` fixed.

        A new key enters at its first entry and is read from the next micro-batch on. This keeps every range
        of every micro-batch in the checkpoint.
        """
        ends = following_of(bounds)
        if (target := self._target) is not None:
            ends = {key: min(number, target[key]) for key, number in ends.items() if key in target}
        entering = {key: bounds[key].first for key in ends if key not in here}
        return {key: max(number, ends.get(key, number)) for key, number in here.items()} | entering

    def _entries_max(self, limit: ReadLimit) -> int:
        if isinstance(limit, ReadMaxRows):
            return limit.max_rows
        return limit.max_files if isinstance(limit, ReadMaxFiles) else self._per_trigger

    def reportLatestOffset(self) -> StoredOffset | None:
        """Return the end of the source, for the query's progress. Less `endOffset`, it is the backlog."""
        return self._offsets.write(following_of(self._seen)) if self._seen else None

    def partitions(self, start: StoredOffset, end: StoredOffset) -> list[InputPartition]:
        """Return the tasks for the range between two offsets, which are the same after every restart."""
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
    """Split `pieces` into at most `tasks` non-empty contiguous runs of almost equal lengths."""
    count = min(tasks, len(pieces))
    edges = [len(pieces) * number // count for number in range(count + 1)] if count else [0]
    return [pieces[low:high] for low, high in itertools.pairwise(edges)]


def check_schema(
    schema: StructType, columns: Sequence[str], known: KnownColumns, format_name: str, advice: str
) -> None:
    """Raise `ConfigError` if the user's schema differs from that of the chosen columns."""
    given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
    if given != [(name, known[name][0]) for name in columns]:
        raise ConfigError(
            f"{format_name} has the schema {spark_schema(columns, known)!r}; choose columns with the option "
            f"'columns' and {advice} in the query, instead of giving another schema"
        )
