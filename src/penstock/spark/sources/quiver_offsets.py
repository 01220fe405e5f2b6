"""Where a stream over segments stands: the next number of every core. Plain arithmetic, no I/O.

An offset travels as JSON, `{"next": {"0": 18}, "after": {"0": "4c1d…@1748450001000000000"}}`: core to the
first segment that has not been read, and the checksum and time of the last one that was. Numbers start over
in a directory that was made anew, checksums do not repeat; so `after` tells that it is another directory. It
is absent for a core of which nothing was read.

A core that appears while a stream runs enters the offset at its first segment, and is read from the next
micro-batch on, so that every range of every micro-batch stands in the checkpoint. Spark compares offsets as
text: cores always stand in numeric order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.errors import ConfigError, Corrupt
from penstock.quiver import SegmentInfo
from penstock.spark.sources.offsets import Place, admit_batches, parse_places, sequence_of

SegmentOffset: TypeAlias = dict[int, int]
"""Core to the first segment that has not been read."""
Marks: TypeAlias = dict[int, str]
"""Core to what is known of the last segment that was read."""
StoredOffset: TypeAlias = dict[str, "dict[str, int] | dict[str, str]"]
Position: TypeAlias = Place | Mapping[int, Place]
"""One place for every core, or one each."""

_NEXT: Final = "next"
_AFTER: Final = "after"
_HOUR_NS: Final = 3_600_000_000_000
_ANEW: Final = (
    "the directory was made anew, or the checkpoint belongs to another one. Start with a new checkpoint"
)


class SegmentGap(Corrupt):
    """Segments that are asked for were removed before they were read, or are others than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreBounds:
    """What a core holds: segments from `first` on, and `following` is the first that is not there yet."""

    first: int
    following: int


def bounds_of(infos: Iterable[SegmentInfo]) -> dict[int, CoreBounds]:
    """First and following number of every core that has segments, whatever they hold."""
    seqs: dict[int, list[int]] = {}
    for info in infos:
        seqs.setdefault(info.core_id, []).append(info.seq)
    return {core: CoreBounds(first=min(held), following=max(held) + 1) for core, held in sorted(seqs.items())}


def write_offset(places: Mapping[int, int], marks: Mapping[int, str] | None = None) -> StoredOffset:
    """As Spark stores it."""
    stored: StoredOffset = {_NEXT: {str(core): places[core] for core in sorted(places)}}
    if marks:
        stored[_AFTER] = {str(core): marks[core] for core in sorted(marks)}
    return stored


def read_offset(stored: object) -> tuple[SegmentOffset, Marks]:
    """The places in a checkpoint, and what is known of the segments before them. Raises `SegmentGap`."""
    if not isinstance(stored, Mapping):
        raise _no_offset(stored)
    try:
        places = {int(core): sequence_of(place) for core, place in stored[_NEXT].items()}
        marks = {int(core): str(mark) for core, mark in stored.get(_AFTER, {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_offset(stored) from error
    return places, marks


def _no_offset(stored: object) -> SegmentGap:
    return SegmentGap(
        f"the checkpoint holds {stored!r}, which is no offset of segments: it belongs to another query. "
        "Start with a new checkpoint"
    )


def parse_position(text: str, option: str) -> Position:
    """`earliest`, `latest`, a number, or JSON with one of them per core. Raises `ConfigError`."""
    return parse_places(
        text, option, lambda core: sequence_of(int(core)), example='{"0": 17}', number="a number", first=1
    )


def resolve(position: Position, bounds: Mapping[int, CoreBounds], option: str) -> SegmentOffset:
    """The position in numbers, for every core there is. Raises `ConfigError` for a core that is not."""
    if not isinstance(position, Mapping):
        if isinstance(position, int) and len(bounds) > 1:
            raise ConfigError(f"{option}: each core has its own numbers; give JSON with all of them")
        return {core: _at(position, held) for core, held in bounds.items()}
    unknown = sorted(set(position) - set(bounds))
    if unknown:
        raise ConfigError(f"{option}: there is no core {unknown[0]}; there are {sorted(bounds)}")
    return {core: _at(position.get(core, "earliest"), held) for core, held in bounds.items()}


def _at(place: Place, bounds: CoreBounds) -> int:
    if isinstance(place, int):
        return place
    return bounds.first if place == "earliest" else bounds.following


def admit(start: Mapping[int, int], end: Mapping[int, int], limit: int) -> SegmentOffset:
    """As far from `start` towards `end` as `limit` segments go, taken evenly from all cores."""
    return admit_batches(start, end, limit)


def between(
    infos: Iterable[SegmentInfo], start: Mapping[int, int], end: Mapping[int, int]
) -> list[SegmentInfo]:
    """The segments that lie between two offsets; a core that `start` does not know has none."""
    return [
        info
        for info in infos
        if info.core_id in start and start[info.core_id] <= info.seq < end.get(info.core_id, 0)
    ]


def absent(
    infos: Iterable[SegmentInfo], start: Mapping[int, int], end: Mapping[int, int]
) -> list[tuple[int, int]]:
    """Core and number of every segment between two offsets that is not there."""
    held = {(info.core_id, info.seq) for info in between(infos, start, end)}
    return [
        (core, seq)
        for core in sorted(start)
        for seq in range(start[core], end.get(core, start[core]))
        if (core, seq) not in held
    ]


def told_ranges(missing: Sequence[tuple[int, int]]) -> str:
    """Segments by core and number, for people: neighbours are told together."""
    runs: list[list[int]] = []
    for core, seq in missing:
        if runs and runs[-1][0] == core and runs[-1][2] == seq - 1:
            runs[-1][2] = seq
        else:
            runs.append([core, seq, seq])
    texts = [
        f"{first} of core {core}" if first == last else f"{first} to {last} of core {core}"
        for core, first, last in runs
    ]
    return ", ".join(texts)


def check_order(start: Mapping[int, int], end: Mapping[int, int]) -> None:
    """Raise `SegmentGap` if a range of the checkpoint runs backwards, or a core is missing from its end."""
    for core, place in start.items():
        if end.get(core, 0) < place:
            raise SegmentGap(
                f"the checkpoint goes back from {place} to {end.get(core, 0)} in core {core}: it is damaged"
            )


def marks_at(infos: Iterable[SegmentInfo], places: Mapping[int, int], known: Mapping[int, str]) -> Marks:
    """What is known of the last segment before each place; what was known before stays for the others."""
    found = {
        info.core_id: f"{info.xxh3}@{info.ingest_ns_max}"
        for info in infos
        if places.get(info.core_id, 0) - 1 == info.seq
    }
    return {core: mark for core, mark in ({**known, **found}).items() if core in places}


def check_identity(infos: Iterable[SegmentInfo], places: Mapping[int, int], marks: Mapping[int, str]) -> None:
    """Raise `SegmentGap` if these are not the segments that were read.

    The last one that was read has another checksum; or segments that count as read came in long after it,
    which numbers that started over explain and nothing else does.
    """
    for info in infos:
        mark = marks.get(info.core_id)
        place = places.get(info.core_id, 0)
        if mark is None or info.seq >= place:
            continue
        checksum, _, last_ns = mark.partition("@")
        is_last = info.seq == place - 1
        if (is_last and info.xxh3 != checksum) or (
            last_ns.isdigit() and info.ingest_ns_min > int(last_ns) + _HOUR_NS
        ):
            raise SegmentGap(
                f"segment {info.seq} of core {info.core_id} is not the one that was read: {_ANEW}"
            )
