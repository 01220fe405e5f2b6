"""The offsets of streams over segments, and the segments between two of them. Plain arithmetic, no I/O.

An offset, `{"next": {"0": 18}, "after": {"0": "4c1d…@1748450001000000000"}}`, contains the first unread
segment of each core, and the checksum and time of the segment before it. A core that appears while a stream
runs starts at its first segment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from penstock.errors import ConfigError, Corrupt
from penstock.quiver import SegmentInfo
from penstock.spark.sources.offsets import Bounds, Offsets, Position, parse_places, sequence_of

_HOUR_NS: Final = 3_600_000_000_000


class SegmentGap(Corrupt):
    """Segments were removed before they were read, or are not the segments that the checkpoint has read."""


def bounds_of(infos: Iterable[SegmentInfo]) -> dict[int, Bounds]:
    """Return the bounds of every core that has segments."""
    seqs: dict[int, list[int]] = {}
    for info in infos:
        seqs.setdefault(info.core_id, []).append(info.seq)
    return {core: Bounds(first=min(held), following=max(held) + 1) for core, held in sorted(seqs.items())}


def parse_position(text: str, option: str) -> Position:
    """Parse `earliest`, `latest`, a number, or JSON with one of them for each core.

    Raise `ConfigError` for other text.
    """
    return parse_places(
        text, option, lambda core: sequence_of(int(core)), example='{"0": 17}', number="a number", first=1
    )


class SegmentOffsets(Offsets[int, str]):
    """The offsets of segments: numbers by core, marked with the checksum and time of the last segment."""

    gap = SegmentGap
    another = (
        "the directory was deleted and created again, or the checkpoint belongs to another one. "
        "Start with a new checkpoint"
    )
    what = "segments"

    def key(self, text: str) -> int:
        return sequence_of(int(text))

    def mark(self, value: object) -> str:
        return str(value)

    def name(self, key: int, count: int) -> str:
        return f"core {key}"

    def check_keys(self, given: Collection[int], bounds: Mapping[int, Bounds], option: str) -> None:
        """Raise `ConfigError` for an unknown core. A missing core starts at its earliest segment."""
        unknown = sorted(set(given) - set(bounds))
        if unknown:
            raise ConfigError(f"{option}: there is no core {unknown[0]}; there are {sorted(bounds)}")

    def check_requested(
        self, requested: Mapping[int, int], bounds: Mapping[int, Bounds], option: str, *, earlier: bool = True
    ) -> None:
        """Accept every number: a directory does not show which segments it had in the past."""

    def check_identity(
        self, infos: Iterable[SegmentInfo], numbers: Mapping[int, int], marks: Mapping[int, str]
    ) -> None:
        """Raise `SegmentGap` if these are not the segments that were read.

        Then either the last read segment has another checksum, or a segment that counts as read is much newer
        than the last read one, which happens only if the numbers started over.
        """
        for info in infos:
            mark = marks.get(info.core_id)
            number = numbers.get(info.core_id, 0)
            if mark is None or info.seq >= number:
                continue
            checksum, _, last_ns = mark.partition("@")
            is_last = info.seq == number - 1
            if (is_last and info.xxh3 != checksum) or (
                last_ns.isdigit() and info.ingest_ns_min > int(last_ns) + _HOUR_NS
            ):
                raise SegmentGap(
                    f"segment {info.seq} of core {info.core_id} is not the one that was read: {self.another}"
                )


def marks_at(
    infos: Iterable[SegmentInfo], numbers: Mapping[int, int], known: Mapping[int, str]
) -> dict[int, str]:
    """Return the mark of the last segment before each number, or the known mark if that segment is gone."""
    found = {
        info.core_id: f"{info.xxh3}@{info.ingest_ns_max}"
        for info in infos
        if numbers.get(info.core_id, 0) - 1 == info.seq
    }
    return {core: mark for core, mark in ({**known, **found}).items() if core in numbers}


def segments_between(
    infos: Iterable[SegmentInfo], start: Mapping[int, int], end: Mapping[int, int]
) -> list[SegmentInfo]:
    """Return the segments between two offsets, without cores that are missing in `start`."""
    return [
        info
        for info in infos
        if info.core_id in start and start[info.core_id] <= info.seq < end.get(info.core_id, 0)
    ]


def missing_segments(
    infos: Iterable[SegmentInfo], start: Mapping[int, int], end: Mapping[int, int]
) -> list[tuple[int, int]]:
    """Return the core and number of every missing segment between two offsets."""
    held = {(info.core_id, info.seq) for info in segments_between(infos, start, end)}
    return [
        (core, seq)
        for core in sorted(start)
        for seq in range(start[core], end.get(core, start[core]))
        if (core, seq) not in held
    ]


def segment_ranges(missing: Sequence[tuple[int, int]]) -> str:
    """Return segments, given by core and number, as text. Adjacent segments become a range."""
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
