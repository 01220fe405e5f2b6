"""The inputs and findings of an audit, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.findings import Finding
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.sources.offsets import Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Sequences `first` to `last` of a shard."""

    shard: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding(Finding):
    """A finding with the sequences that it is about."""

    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """One shard of the queue: entries `first` to `following - 1`."""

    first: int
    following: int
    counts: Mapping[int, int]
    """Records of every batch that is still stored, whether in the queue or after it."""
    broken: Mapping[int, str] = field(default_factory=dict)
    """Entries of the queue whose batch cannot be counted, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """A sink's own record of this pipeline's query."""

    place: str
    last: int | None
    """The last micro-batch it has."""
    rows: Mapping[int, int] | None
    """Rows by micro-batch; None if it does not record them (a merge, a queue)."""
    complete: bool = True
    """Whether its history goes back to its beginning."""
    row_count: int | None = None
    """The rows in it now, read after `rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All inputs of an audit. `done` and `planned` are None if the checkpoint cannot be read."""

    origin: Offset | None
    """The start of the first micro-batch, which need not exist yet."""
    queue: Mapping[int, ShardFacts]
    done: frozenset[int] | None
    lines: tuple[BatchLine, ...]
    sinks: Mapping[str, TableFacts]
    letters: TableFacts | None
    planned: Mapping[int, Offset] | None
    ends: Mapping[int, int]
    """The next sequence of each shard, read last."""


def spans_between(start: Mapping[int, int], end: Mapping[int, int]) -> tuple[Span, ...]:
    """Return the sequences from one offset to another."""
    pairs = ((shard, start.get(shard, 0), end[shard]) for shard in sorted(end))
    return tuple(Span(shard=shard, first=low, last=high - 1) for shard, low, high in pairs if low < high)


def spans_text(spans: Iterable[Span]) -> str:
    """Return sequences as text, shard by shard."""
    spans = tuple(spans)
    texts = []
    for span in spans:
        plain = (
            f"sequence {span.first}" if span.first == span.last else f"sequences {span.first} to {span.last}"
        )
        texts.append(plain if len(spans) == 1 and span.shard == 0 else f"{plain} of shard {span.shard}")
    return ", ".join(texts) or "no sequences"
