"""The inputs and findings of an audit as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.findings import Finding
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.sources.offsets import Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A range of sequences in a shard, `first` to `last`."""

    shard: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding(Finding):
    """A finding with the sequences that it concerns."""

    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """The state of one shard of the queue, with entries `first` to `following - 1`."""

    first: int
    following: int
    counts: Mapping[int, int]
    """The number of records in every batch that is still stored, even if it has left the queue."""
    broken: Mapping[int, str] = field(default_factory=dict)
    """The entries of the queue whose batch cannot be counted, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """The state of a sink for this pipeline's query."""

    place: str
    last: int | None
    """The last micro-batch in the sink."""
    rows: Mapping[int, int] | None
    """The number of rows by micro-batch, or None if the sink does not record it (a merge, a queue)."""
    complete: bool = True
    """Whether its history reaches back to its beginning."""
    row_count: int | None = None
    """The current number of rows, read after `rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All inputs of an audit. `done` and `planned` are None if the checkpoint cannot be read."""

    origin: Offset | None
    """The start of the first micro-batch, even if it does not exist yet."""
    queue: Mapping[int, ShardFacts]
    done: frozenset[int] | None
    lines: tuple[BatchLine, ...]
    sinks: Mapping[str, TableFacts]
    letters: TableFacts | None
    planned: Mapping[int, Offset] | None
    ends: Mapping[int, int]
    """The next sequence of each shard, read last."""


def spans_between(start: Mapping[int, int], end: Mapping[int, int]) -> tuple[Span, ...]:
    """Return the ranges of sequences from one offset to another."""
    pairs = ((shard, start.get(shard, 0), end[shard]) for shard in sorted(end))
    return tuple(Span(shard=shard, first=low, last=high - 1) for shard, low, high in pairs if low < high)


def spans_text(spans: Iterable[Span]) -> str:
    """Return ranges of sequences as text, shard by shard."""
    spans = tuple(spans)
    texts = []
    for span in spans:
        plain = (
            f"sequence {span.first}" if span.first == span.last else f"sequences {span.first} to {span.last}"
        )
        texts.append(plain if len(spans) == 1 and span.shard == 0 else f"{plain} of shard {span.shard}")
    return ", ".join(texts) or "no sequences"
