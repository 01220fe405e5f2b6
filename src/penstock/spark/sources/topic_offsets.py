"""The offsets of streams over topics, and the ranges of records between two of them. Plain arithmetic.

An offset, `{"next": {"clicks": 18}, "ts": {"clicks": 1748450001000}}`, contains the first unread sequence of
each topic and the time of the record before it. The time is missing if that record is unknown: nothing was
read, or the record was deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from penstock.errors import Corrupt
from penstock.spark.sources.offsets import Bounds, Offsets, Place, parse_places, sequence_of

Position: TypeAlias = Place | Mapping[str, Place]
"""One position for all topics, or one for each."""


class TopicGap(Corrupt):
    """A topic no longer has the required records, or is not the topic that the checkpoint has read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRange:
    """A range of records in a topic, `first` to `last`."""

    topic: str
    first: int
    last: int
    gone: bool = False
    """Whether the topic had none of them when the range was planned. A request returns the reason."""


def parse_position(text: str, option: str) -> Position:
    """Parse `earliest`, `latest`, a sequence, or JSON with one of them for each topic.

    Raise `ConfigError` for other text.
    """
    return parse_places(text, option, str, example='{"clicks": 17}', first=1)


class TopicOffsets(Offsets[str, int]):
    """The offsets of topics: sequences by topic, marked with the time of the last record."""

    gap = TopicGap
    another = (
        "the topic was deleted and created again, or set back, or the checkpoint belongs to another server. "
        "Start with a new checkpoint"
    )
    marks_field = "ts"
    what = "topics"

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = sorted(topics)

    def key(self, text: str) -> str:
        return str(text)

    def mark(self, value: object) -> int:
        return sequence_of(value)

    def name(self, key: str, count: int) -> str:
        return key

    def read(self, stored: object) -> tuple[dict[str, int], dict[str, int]]:
        """Return the sequences and the times in a checkpoint.

        Raise `TopicGap` if the checkpoint belongs to other topics.
        """
        numbers, times = super().read(stored)
        if sorted(numbers) != self._topics:
            raise TopicGap(
                f"the checkpoint has read {', '.join(sorted(numbers))} and the query reads "
                f"{', '.join(self._topics)}: the topics of a query cannot change. Start with a new "
                "checkpoint, or read the new topics in a separate query"
            )
        return numbers, times

    def check_time(self, topic: str, seq: int, known_ms: int, found_ms: int) -> None:
        """Raise `TopicGap` if the last read record now has another time."""
        if known_ms != found_ms:
            raise TopicGap(f"record {seq} of {topic}, the last one read, has changed since: {self.another}")


def ranges_between(
    start: Mapping[str, int], end: Mapping[str, int], bounds: Mapping[str, Bounds]
) -> list[TopicRange]:
    """Return the ranges between two offsets, topic by topic.

    Records that have left a topic form a separate range.
    """
    ranges: list[TopicRange] = []
    for topic in sorted(start):
        held = min(max(start[topic], bounds[topic].first), end[topic])
        front = TopicRange(topic=topic, first=start[topic], last=held - 1, gone=True)
        rest = TopicRange(topic=topic, first=held, last=end[topic] - 1)
        ranges += [piece for piece in (front, rest) if piece.last >= piece.first]
    return ranges


def cut(ranges: Sequence[TopicRange], length: int) -> list[TopicRange]:
    """Split ranges into pieces of up to `length` sequences. A range that is gone stays in one piece."""
    pieces: list[TopicRange] = []
    for whole in ranges:
        step = whole.last - whole.first + 1 if whole.gone else length
        pieces += [
            replace(whole, first=first, last=min(first + step - 1, whole.last))
            for first in range(whole.first, whole.last + 1, step)
        ]
    return pieces
