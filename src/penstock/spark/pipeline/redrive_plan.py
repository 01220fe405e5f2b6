"""Which dead letters go back, and how they are laid out as batches. Pure: Arrow in, Arrow out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.buffer import Metadata

__all__ = ["LetterBatch", "Letters", "Position", "Wanted", "choose", "lay_out", "pick", "reasons_of"]

Position: TypeAlias = tuple[int, int, int]
"""Shard, sequence, index: the place that a record had in the queue."""

POSITION: Final = ("shard", "sequence", "index")
_SCHEMA: Final = pa.schema([("shard", pa.int32()), ("sequence", pa.int64()), ("index", pa.int32())])
_FRAMING_BYTES: Final = 8
_ITEM_BYTES: Final = 16
_METADATA_BYTES_MAX: Final = 1 << 20
"""What one batch may add to the manifest, which every append transfers whole."""

Letters: TypeAlias = pa.Table
"""Letters with the columns `penstock.spark.pipeline.letters.HEADS` or `BODIES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which letters are meant. Nothing set means all."""

    reason: str | None = None
    """Text that the reason holds, in any case."""
    sequences: tuple[int, int] | None = None
    """First and last sequence."""
    since_ms: int | None = None
    """When the letter was written, at the earliest."""
    limit: int | None = None
    positions: frozenset[Position] | None = None
    """These letters alone."""


def choose(heads: Letters, pipeline: str, taken: Iterable[Position], wanted: Wanted) -> Letters:
    """The letters to redrive, in the order of the queue, each position once.

    Holes (index -1) are no records, and what an earlier redrive has `taken` is never taken again.
    """
    if not heads.num_rows:
        return heads
    rows = heads.filter((pc.field("pipeline") == pipeline) & (pc.field("index") >= 0))
    if wanted.reason is not None:
        rows = rows.filter(pc.match_substring(rows["reason"], wanted.reason, ignore_case=True))
    if wanted.sequences is not None:
        first, last = wanted.sequences
        rows = rows.filter((pc.field("sequence") >= first) & (pc.field("sequence") <= last))
    if wanted.since_ms is not None:
        since = pa.scalar(wanted.since_ms * 1000, pa.timestamp("us", "UTC"))
        rows = rows.filter(pc.greater_equal(rows["at"].cast(pa.timestamp("us", "UTC")), since))
    rows = _without(_distinct(rows), taken)
    if wanted.positions is not None:
        rows = pick(rows, pipeline, sorted(wanted.positions))
    return rows if wanted.limit is None else rows.slice(0, wanted.limit)


def _distinct(rows: Letters) -> Letters:
    ordered = rows.sort_by([(name, "ascending") for name in POSITION])
    if ordered.num_rows < 2:
        return ordered
    columns = [ordered[name].to_numpy() for name in POSITION]
    differs = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return ordered.filter(pa.array(np.concatenate([[True], differs])))


def _without(rows: Letters, taken: Iterable[Position]) -> Letters:
    table = _positions(taken)
    if not table.num_rows:
        return rows
    typed = rows.select(POSITION).cast(_SCHEMA).append_column("_row", pa.array(np.arange(rows.num_rows)))
    left = typed.join(table, list(POSITION), join_type="left anti")
    return rows.take(left["_row"].sort())


def _positions(places: Iterable[Position]) -> pa.Table:
    listed = list(places)
    columns = zip(*listed, strict=True) if listed else ((), (), ())
    return pa.table(dict(zip(POSITION, map(list, columns), strict=True)), schema=_SCHEMA)


def pick(bodies: Letters, pipeline: str, places: Sequence[Position]) -> Letters:
    """The letters at `places`, in their order; fewer if some are not there any more."""
    if not bodies.num_rows:
        return bodies
    rows = _distinct(bodies.filter((pc.field("pipeline") == pipeline) & (pc.field("index") >= 0)))
    typed = rows.select(POSITION).cast(_SCHEMA).append_column("_row", pa.array(np.arange(rows.num_rows)))
    found = typed.join(_positions(places), list(POSITION), join_type="left semi")
    return rows.take(found["_row"].sort())


def reasons_of(heads: Letters) -> dict[str, int]:
    """How many letters have which reason, the most frequent first."""
    counted = pc.value_counts(heads["reason"].combine_chunks()) if heads.num_rows else []
    pairs = ((str(one["values"].as_py()), int(one["counts"].as_py())) for one in counted)
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterBatch:
    """Records for one batch object, with the metadata that they came with."""

    values: pa.Array
    metadata: tuple[Metadata, ...]


def lay_out(letters: Letters, batch_bytes: int, now_ms: int) -> list[LetterBatch]:
    """The letters as batches of about `batch_bytes`. A letter whose time is unknown gets `now_ms`."""
    if not letters.num_rows:
        return []
    values = letters["value"].combine_chunks().cast(pa.binary())
    sizes = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    runs = _runs(letters, now_ms)
    marks = np.zeros(len(sizes), np.int64)
    for start, (_, payload) in runs.items():
        marks[start] = _ITEM_BYTES + len(payload)
    batches: list[LetterBatch] = []
    starts = np.fromiter(runs, np.int64)
    for first, end in _cuts(sizes + _FRAMING_BYTES, marks, batch_bytes):
        begin = int(np.searchsorted(starts, first, side="right")) - 1
        until = int(np.searchsorted(starts, end, side="left"))
        items = (
            Metadata(
                start_index=max(0, int(start) - first),
                ingestion_time_ms=runs[int(start)][0],
                payload=runs[int(start)][1],
            )
            for start in starts[begin:until]
        )
        batches.append(LetterBatch(values=values.slice(first, end - first), metadata=tuple(items)))
    return batches


def _runs(letters: Letters, now_ms: int) -> dict[int, tuple[int, bytes]]:
    """Where metadata or time change: row to (time, payload)."""
    payloads = pc.fill_null(letters["metadata"].combine_chunks().cast(pa.binary()), b"")
    moments_ms = letters["ingestion_time"].combine_chunks().cast(pa.timestamp("ms", "UTC"), safe=False)
    times = pc.fill_null(moments_ms.cast(pa.int64()), now_ms)
    keys = payloads.dictionary_encode().indices.to_numpy()
    moments = times.to_numpy()
    changes = np.flatnonzero((keys[1:] != keys[:-1]) | (moments[1:] != moments[:-1])) + 1
    starts = [0, *changes.tolist()]
    return {start: (int(moments[start]), payloads[start].as_py()) for start in starts}


def _cuts(weights: np.ndarray, marks: np.ndarray, batch_bytes: int) -> list[tuple[int, int]]:
    """Ranges of rows whose weights stay below `batch_bytes`, and their metadata below its own bound."""
    cuts: list[tuple[int, int]] = []
    total, noted = np.cumsum(weights), np.cumsum(marks)
    first = 0
    while first < len(weights):
        used = int(total[first - 1]) if first else 0
        told = int(noted[first - 1]) if first else 0
        by_size = int(np.searchsorted(total, used + batch_bytes, side="right"))
        by_notes = int(np.searchsorted(noted, told + _METADATA_BYTES_MAX, side="right"))
        end = max(first + 1, min(by_size, by_notes))
        cuts.append((first, end))
        first = end
    return cuts
