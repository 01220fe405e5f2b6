"""Where a stream over topics stands: the next sequence of every topic. Plain arithmetic, no I/O.

An offset travels as JSON, `{"next": {"clicks": 18}, "ts": {"clicks": 1748450001000}}`: topic to the first
sequence that has not been read, and the time of the record just before it. Numbers start over in a topic that
was made anew and times do not, so `ts` tells that this is no longer the topic that was read. It is absent for
a topic of which that record is not known: nothing was read, or it is deleted; then only the numbers are
checked. Spark compares offsets as text, so topics always stand in the order of their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from penstock.errors import ConfigError, Corrupt, InvalidInput
from penstock.spark.sources.offsets import Bounds, Place, admit_batches, parse_places, sequence_of

TopicOffset: TypeAlias = dict[str, int]
"""Topic to the first sequence that has not been read."""
StoredOffset: TypeAlias = dict[str, "dict[str, int]"]
Position: TypeAlias = Place | Mapping[str, Place]
"""One place for every topic, or one each."""

_NEXT: Final = "next"
_TS: Final = "ts"
_ANEW: Final = (
    "it was removed and made anew, or set back, or the checkpoint belongs to another server. Start with a "
    "new checkpoint"
)


class TopicGap(Corrupt):
    """A topic no longer holds what is asked for, or is another one than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRange:
    """Records `first` to `last` of a topic."""

    topic: str
    first: int
    last: int
    gone: bool = False
    """Whether the topic held none of them when it was looked at: one request tells why."""


def write_offset(places: Mapping[str, int], times: Mapping[str, int] | None = None) -> StoredOffset:
    """As Spark stores it."""
    stored = {_NEXT: {topic: places[topic] for topic in sorted(places)}}
    if times:
        stored[_TS] = {topic: times[topic] for topic in sorted(times)}
    return stored


def read_offset(stored: object, topics: Sequence[str]) -> tuple[TopicOffset, dict[str, int]]:
    """The places in a checkpoint, and the times. Raises `TopicGap` if they are not of these topics."""
    if not isinstance(stored, Mapping):
        raise _no_offset(stored)
    try:
        places = {str(topic): sequence_of(place) for topic, place in stored[_NEXT].items()}
        times = {str(topic): sequence_of(ts) for topic, ts in stored.get(_TS, {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_offset(stored) from error
    if sorted(places) != sorted(topics):
        raise TopicGap(
            f"the checkpoint has read {', '.join(sorted(places))} and the query reads "
            f"{', '.join(sorted(topics))}: a query keeps its topics. Start with a new checkpoint, or read "
            "the new ones with a query of their own"
        )
    return places, times


def _no_offset(stored: object) -> TopicGap:
    return TopicGap(
        f"the checkpoint holds {stored!r}, which is no offset of topics: it belongs to another query. Start "
        "with a new checkpoint"
    )


def parse_position(text: str, option: str) -> Position:
    """`earliest`, `latest`, a sequence, or JSON with one of them per topic. Raises `ConfigError`."""
    return parse_places(text, option, str, example='{"clicks": 17}', first=1)


def resolve(position: Position, bounds: Mapping[str, Bounds], option: str) -> TopicOffset:
    """The position in numbers. Raises `ConfigError` for topics that are missing or are not read."""
    if isinstance(position, int) and len(bounds) > 1:
        raise ConfigError(f"{option}: each topic has its own numbers; give JSON with all of them")
    places = position if isinstance(position, Mapping) else dict.fromkeys(bounds, position)
    if sorted(places) != sorted(bounds):
        raise ConfigError(f"{option}: the query reads {', '.join(sorted(bounds))}; name each of them once")
    return {topic: _at(places[topic], bounds[topic]) for topic in sorted(bounds)}


def _at(place: Place, bounds: Bounds) -> int:
    if isinstance(place, int):
        return place
    return bounds.first if place == "earliest" else bounds.following


def check_asked(asked: Mapping[str, int], bounds: Mapping[str, Bounds], option: str) -> None:
    """Raise `InvalidInput` if a number the user gave lies behind the end of its topic."""
    for topic, place in asked.items():
        if place > bounds[topic].following:
            raise InvalidInput(
                f"{option}: {topic} ends at {bounds[topic].following - 1}; {place} lies behind it"
            )


def check_order(start: Mapping[str, int], end: Mapping[str, int]) -> None:
    """Raise `TopicGap` if a range of the checkpoint runs backwards."""
    for topic, place in start.items():
        if end[topic] < place:
            raise TopicGap(f"the checkpoint goes back from {place} to {end[topic]} in {topic}: it is damaged")


def check_reached(places: Mapping[str, int], bounds: Mapping[str, Bounds]) -> None:
    """Raise `TopicGap` if the checkpoint is ahead of a topic: this is another topic."""
    for topic, place in places.items():
        if place > bounds[topic].following:
            raise TopicGap(
                f"the checkpoint has read {topic} up to {place - 1}, and it ends at "
                f"{bounds[topic].following - 1}: {_ANEW}"
            )


def check_time(topic: str, seq: int, known_ms: int, found_ms: int) -> None:
    """Raise `TopicGap` if the last record that was read is another one by now."""
    if known_ms != found_ms:
        raise TopicGap(f"record {seq} of {topic}, the last that was read, is another one now: {_ANEW}")


def admit(start: Mapping[str, int], end: Mapping[str, int], limit: int) -> TopicOffset:
    """As far from `start` towards `end` as `limit` sequences go, taken evenly from all topics."""
    names = sorted(start)
    reached = admit_batches(
        {number: start[name] for number, name in enumerate(names)},
        {number: end[name] for number, name in enumerate(names)},
        limit,
    )
    return {name: reached[number] for number, name in enumerate(names)}


def ranges_between(
    start: Mapping[str, int], end: Mapping[str, int], bounds: Mapping[str, Bounds]
) -> list[TopicRange]:
    """What lies between two offsets, topic by topic; what the topic no longer holds is a range of its own."""
    ranges: list[TopicRange] = []
    for topic in sorted(start):
        held = min(max(start[topic], bounds[topic].first), end[topic])
        front = TopicRange(topic=topic, first=start[topic], last=held - 1, gone=True)
        rest = TopicRange(topic=topic, first=held, last=end[topic] - 1)
        ranges += [piece for piece in (front, rest) if piece.last >= piece.first]
    return ranges


def cut(ranges: Sequence[TopicRange], length: int) -> list[TopicRange]:
    """The same records in pieces of up to `length` sequences, in order; what is gone stays in one piece."""
    pieces: list[TopicRange] = []
    for whole in ranges:
        step = whole.last - whole.first + 1 if whole.gone else length
        pieces += [
            replace(whole, first=first, last=min(first + step - 1, whole.last))
            for first in range(whole.first, whole.last + 1, step)
        ]
    return pieces
