"""A topic's sequence numbers from the first to the newest, and what became of each stretch. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from penstock.topics import Tombstone

__all__ = ["Kind", "Stretch", "sequence_line"]

Kind: TypeAlias = Literal["live", "tombstone", "deleted", "evicted", "expired"]

_KINDS: Final[dict[str, Kind]] = {"cap": "evicted", "ttl": "expired"}
_DELETED: Final = "deleted, or numbers that no record got"
"""A server that was killed goes on behind the numbers it had set aside."""
_REASONS: Final = {
    "cap": "evicted by the topic's cap",
    "ttl": "expired by the topic's age limit",
    "mixed": "evicted by the cap and expired by age",
    "source_trim": "their source was trimmed before they were copied",
    "lost": "they were lost with damaged files of the log",
    "recreated": "the topic was removed and made anew",
    "from_seq_too_old": "gone before anybody asked",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Sequences `first` to `last`, both included. `live` of them can be read."""

    first: int
    last: int
    kind: Kind
    reason: str
    live: int = 0


def sequence_line(
    *,
    earliest: int,
    head: int,
    count: int,
    tombstone: Tombstone | None,
    scanned: Sequence[int] = (),
    scanned_from: int | None = None,
) -> list[Stretch]:
    """The line from 1 to `head`.

    `tombstone` is what a reader from the beginning is told. `scanned` are the live sequences from
    `scanned_from` on, rising; without them the live part is one stretch, with holes in it if `count` says so.
    """
    line = list(_lost(tombstone))
    begun = line[-1].last + 1 if line else 1
    live_from = earliest if count else head + 1
    if begun < live_from:
        line.append(Stretch(first=begun, last=live_from - 1, kind="deleted", reason=_DELETED))
    if not count:
        return line
    if head - earliest + 1 == count:
        line.append(Stretch(first=earliest, last=head, kind="live", reason="", live=count))
        return line
    line += _with_holes(earliest, head, count, scanned, scanned_from)
    return line


def _lost(tombstone: Tombstone | None) -> Iterator[Stretch]:
    if tombstone is not None and tombstone.gap_to >= tombstone.gap_from:
        yield Stretch(
            first=tombstone.gap_from,
            last=tombstone.gap_to,
            kind=_KINDS.get(tombstone.reason, "tombstone"),
            reason=_REASONS.get(tombstone.reason, tombstone.reason),
        )


def _with_holes(
    earliest: int, head: int, count: int, scanned: Sequence[int], scanned_from: int | None
) -> Iterator[Stretch]:
    start = head + 1 if scanned_from is None else max(scanned_from, earliest)
    if start > earliest:
        holes = (start - earliest) - (count - len(scanned))
        reason = f"{holes} of them deleted" if holes > 0 else ""
        yield Stretch(first=earliest, last=start - 1, kind="live", reason=reason, live=count - len(scanned))
    at = start
    for first, last in _runs(scanned):
        if first > at:
            yield Stretch(first=at, last=first - 1, kind="deleted", reason=_DELETED)
        yield Stretch(first=first, last=last, kind="live", reason="", live=last - first + 1)
        at = last + 1
    if at <= head:
        yield Stretch(first=at, last=head, kind="deleted", reason=_DELETED)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for number in numbers:
        if first is None or last is None:
            first = last = number
        elif number == last + 1:
            last = number
        else:
            yield first, last
            first = last = number
    if first is not None and last is not None:
        yield first, last
