"""The positions of streams: the next number of every shard, core or topic. Plain arithmetic, no I/O.

An offset is a number for each key, and for most keys a mark: what is known of the entry just before that
number. Numbers start over in a queue, directory or topic that is deleted and created again; marks do not
repeat, so a mark shows that a checkpoint was brought to another source even when the numbers fit. Where a
mark is missing, only the numbers are checked.

Spark compares offsets as text: keys are always in order, and a stream that has nothing new returns the
offset it was given. The offset of a queue, `{"0": 17, "after": {"0": "ingest/01J….batch"}}`, names the first
sequence that has not been read, and the location of the entry before it. A queue without shards is shard 0
alone, and so is one whose producers have not stored the number of shards yet: `{"0": 0}` is the beginning of
any queue.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from penstock.errors import ConfigError, Corrupt, InvalidInput

K = TypeVar("K", int, str)
M = TypeVar("M", int, str)

Offset: TypeAlias = dict[int, int]
"""Shard or core to the first number that has not been read."""
StoredOffset: TypeAlias = dict[str, object]
"""An offset as it is stored in the checkpoint."""
Place: TypeAlias = int | Literal["earliest", "latest"]
Position: TypeAlias = Place | Mapping[int, Place]
"""One place for all shards, or one for each."""


class QueueGap(Corrupt):
    """The queue no longer holds the entries that the checkpoint needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The entries of a shard, core or topic: `first` to `following - 1`."""

    first: int
    following: int


def following_of(bounds: Mapping[K, Bounds]) -> dict[K, int]:
    """Return the offset at the end."""
    return {key: held.following for key, held in bounds.items()}


class Offsets(ABC, Generic[K, M]):
    """Writes, reads and checks the offsets of one source.

    A subclass gives the source's names for messages, the fields of its JSON and the types of keys and marks.
    """

    gap: type[Corrupt]
    """Raised for an offset that cannot be one of this source."""
    another: str
    """Possible causes of a gap, and the way out."""
    numbers_field: str | None = "next"
    """None: numbers and marks are in one object."""
    marks_field: str = "after"

    @abstractmethod
    def key(self, text: str) -> K:
        """Parse a key. Raises `ValueError`."""

    @abstractmethod
    def mark(self, value: object) -> M:
        """Check a mark. Raises `ValueError` or `TypeError`."""

    @abstractmethod
    def name(self, key: K, count: int) -> str:
        """Return the name of one of `count` keys for messages."""

    def write(self, numbers: Mapping[K, int], marks: Mapping[K, M] | None = None) -> StoredOffset:
        """Return the offset as Spark stores it."""
        plain = {str(key): numbers[key] for key in sorted(numbers)}
        stored: StoredOffset = {**plain} if self.numbers_field is None else {self.numbers_field: plain}
        if marks:
            stored[self.marks_field] = {str(key): marks[key] for key in sorted(marks)}
        return stored

    def read(self, stored: object) -> tuple[dict[K, int], dict[K, M]]:
        """Return the numbers and the marks in a checkpoint. Raises `gap` if they are not those of a source
        of this kind."""
        try:
            if not isinstance(stored, Mapping):  # the checkpoint of another kind of source
                raise TypeError(f"{stored!r} is not an object")
            numbers = (
                {key: value for key, value in stored.items() if key != self.marks_field}
                if self.numbers_field is None
                else stored[self.numbers_field]
            )
            marks = stored.get(self.marks_field, {})
            return (
                {self.key(key): sequence_of(value) for key, value in sorted(numbers.items())},
                {self.key(key): self.mark(value) for key, value in marks.items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.gap(
                f"the checkpoint holds {stored!r}, which is not an offset of {self.what}: {self.another}"
            ) from error

    @property
    @abstractmethod
    def what(self) -> str:
        """The source's name for messages."""

    def resolve(
        self, position: Place | Mapping[K, Place], bounds: Mapping[K, Bounds], option: str
    ) -> dict[K, int]:
        """Return the position in numbers. Raises `ConfigError` for keys that are missing or do not exist."""
        if isinstance(position, int) and len(bounds) > 1:
            held = ", ".join(self.name(key, len(bounds)) for key in sorted(bounds))
            raise ConfigError(f"{option}: {held} have numbers of their own; give JSON with all of them")
        places = position if isinstance(position, Mapping) else dict.fromkeys(bounds, position)
        self.check_keys(places, bounds, option)
        return {key: _at(places.get(key, "earliest"), bounds[key]) for key in sorted(bounds)}

    def check_keys(self, given: Collection[K], bounds: Mapping[K, Bounds], option: str) -> None:
        """Raise `ConfigError` unless a position names each key once."""
        if sorted(given) != sorted(bounds):
            held = ", ".join(self.name(key, len(bounds)) for key in sorted(bounds))
            raise ConfigError(f"{option}: the query reads {held}; name each of them once")

    def resolve_range(
        self,
        starting: Place | Mapping[K, Place],
        ending: Place | Mapping[K, Place],
        bounds: Mapping[K, Bounds],
        *,
        earlier: bool = True,
    ) -> tuple[dict[K, int], dict[K, int]]:
        """Return the numbers between which a batch query reads.

        Raises `ConfigError` for a range that runs backwards, and what `resolve` and `check_asked` raise.
        """
        start = self.resolve(starting, bounds, "startingOffsets")
        end = self.resolve(ending, bounds, "endingOffsets")
        self.check_asked(start, bounds, "startingOffsets", earlier=earlier)
        self.check_asked(end, bounds, "endingOffsets", earlier=earlier)
        for key, number in start.items():
            if number > end[key]:
                name = self.name(key, len(start))
                raise ConfigError(f"startingOffsets {number} is after endingOffsets {end[key]} in {name}")
        return start, end

    def check_asked(
        self, asked: Mapping[K, int], bounds: Mapping[K, Bounds], option: str, *, earlier: bool = True
    ) -> None:
        """Raise `InvalidInput` unless the source has reached every number the user gave.

        Without `earlier` it must also still hold each of them.
        """
        for key, held in bounds.items():
            number, name = asked[key], self.name(key, len(bounds))
            if (0 if earlier else held.first) <= number <= held.following:
                continue
            raise InvalidInput(
                f"{option}: {name} holds {held.first} to {held.following - 1}; {number} is outside"
                if held.following > held.first
                else f"{option}: {name} is empty and continues at {held.following}; {number} is outside"
            )

    def check_reached(self, numbers: Mapping[K, int], bounds: Mapping[K, Bounds]) -> None:
        """Raise `gap` if the checkpoint is ahead of the source: then it belongs to another one."""
        for key, held in bounds.items():
            if numbers[key] > held.following:
                raise self.gap(
                    f"the checkpoint has read {self.name(key, len(bounds))} up to {numbers[key] - 1}, but it "
                    f"has handed out numbers only up to {held.following - 1}: {self.another}"
                )

    def check_order(self, start: Mapping[K, int], end: Mapping[K, int]) -> None:
        """Raise `gap` if a micro-batch would end before it starts: it would be empty, and the records planned
        for it would be lost."""
        for key, number in start.items():
            if number > end.get(key, 0):
                raise self.gap(
                    f"the micro-batch of {self.name(key, len(start))} would start at {number} and end at "
                    f"{end.get(key, 0)}: the starting position has moved since the first micro-batch was "
                    "planned, or the checkpoint is damaged. Give startingOffsets as a number, or start with "
                    "a new checkpoint"
                )


class QueueOffsets(Offsets[int, str]):
    """The offsets of a queue: sequences by shard, marked with the location of the last batch."""

    gap = QueueGap
    another = (
        "the manifest was deleted and created again, or the checkpoint belongs to another queue. "
        "Point the query at its own queue, or start with a new checkpoint"
    )
    numbers_field = None

    def __init__(self, queue: str) -> None:
        self._queue = queue

    @property
    def what(self) -> str:
        return self._queue

    def key(self, text: str) -> int:
        return sequence_of(int(text))

    def mark(self, value: object) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} is not a location")
        return value

    def name(self, key: int, count: int) -> str:
        return self._queue if count == 1 else f"shard {key} of {self._queue}"

    def fit(self, numbers: Offset, marks: Mapping[int, str], shards: Collection[int]) -> Offset:
        """Return the numbers for all shards. Raises `QueueGap` unless they are of this queue's shards.

        An offset that has read nothing of fewer shards is from before the queue had its shards: all of them
        start at 0.
        """
        if not marks and _is_nothing(numbers, shards):
            return dict.fromkeys(sorted(shards), 0)
        if sorted(numbers) != sorted(shards):
            raise QueueGap(
                f"the checkpoint knows {len(numbers)} shards, {self._queue} has {len(shards)}: {self.another}"
            )
        return dict(sorted(numbers.items()))

    def check_identity(
        self, offset: Offset, marks: Mapping[int, str], location_of: Callable[[int, int], str | None]
    ) -> None:
        """Raise `QueueGap` if the last entry that was read has another location: this is another queue.

        `location_of(shard, sequence)` is None for an entry that is no longer known, and then not checked.
        """
        for shard, location in marks.items():
            last = offset.get(shard, 0) - 1
            found = location_of(shard, last) if last >= 0 else None
            if found is not None and found != location:
                raise QueueGap(
                    f"the checkpoint has read {self.name(shard, len(offset))} up to {last}, which was "
                    f"{location}, but {found} is there now: {self.another}"
                )

    def check_held(self, start: Offset, bounds: Mapping[int, Bounds]) -> None:
        """Raise `QueueGap` if the next entry has left the queue."""
        for shard, held in bounds.items():
            if start[shard] < held.first:
                raise QueueGap(
                    f"{self.name(shard, len(bounds))} begins at {held.first}, but this query continues at "
                    f"{start[shard]}: another consumer has acknowledged the entries between, or "
                    f"{self.another}. To continue and keep a row that describes the gap, set onGap=record"
                )


def _is_nothing(places: Mapping[int, Place], shards: Collection[int]) -> bool:
    """Return whether these are zeros for some of the shards only."""
    return bool(places) and set(places) < set(shards) and all(place == 0 for place in places.values())


def spread_start(position: Position, shards: Collection[int]) -> Position:
    """Spread a start at 0 that was given before the queue had its shards; return any other as it is."""
    places: Mapping[int, Place] = position if isinstance(position, Mapping) else {0: position}
    return dict.fromkeys(shards, 0) if _is_nothing(places, shards) else position


def sequence_of(value: object) -> int:
    """Check a number in a checkpoint or an option. Raises `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a sequence")
    return value


def parse_position(text: str, option: str) -> Position:
    """Parse `earliest`, `latest`, a sequence, or JSON with one of them for each shard.

    Raises `ConfigError`.
    """
    return parse_places(text, option, lambda shard: sequence_of(int(shard)), example='{"0": 17}')


def parse_places(
    text: str,
    option: str,
    key: Callable[[str], K],
    *,
    example: str,
    number: str = "a sequence",
    first: int = 0,
) -> Place | dict[K, Place]:
    """Parse `earliest`, `latest`, a number of at least `first`, or JSON with one of them for each key.

    Raises `ConfigError`, in which `number` and `example` say what was expected.
    """
    plain = text.strip()
    try:
        if not plain.startswith("{"):
            return _place(plain, first)
        return {key(name): _place(place, first) for name, place in json.loads(plain).items()}
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{option}: expected earliest, latest, {number} or JSON such as {example}, found {text!r}"
        ) from error


def _place(value: object, first: int) -> Place:
    if value == "earliest" or value == "latest":
        return "earliest" if value == "earliest" else "latest"
    place = sequence_of(int(value) if isinstance(value, str) else value)
    if place < first:
        raise ValueError(f"numbers start at {first}")
    return place


def _at(place: Place, bounds: Bounds) -> int:
    if isinstance(place, int):
        return place
    return bounds.first if place == "earliest" else bounds.following


def backlog(offset: Mapping[K, int], following: Mapping[K, int]) -> int:
    """Return how many entries follow `offset`; a key that `following` lacks has none."""
    return sum(max(0, following.get(key, place) - place) for key, place in offset.items())


def admit(start: Mapping[K, int], end: Mapping[K, int], limit: int) -> dict[K, int]:
    """Advance from `start` towards `end` by `limit` entries, taken evenly from all keys.

    Entries that a short key does not use go to the others; when less than one each is left, the keys with the
    longest backlog get them.
    """
    left = limit
    taken = dict.fromkeys(start, 0)
    unfinished = [key for key in sorted(start) if end[key] > start[key]]
    while left > 0 and unfinished:
        unfinished.sort(key=lambda key: start[key] + taken[key] - end[key])
        share = max(1, left // len(unfinished))
        for key in unfinished:
            step = min(share, end[key] - start[key] - taken[key], left)
            taken[key] += step
            left -= step
        unfinished = [key for key in unfinished if start[key] + taken[key] < end[key]]
    return {key: place + taken[key] for key, place in start.items()}


def admit_bytes(
    start: Mapping[int, int],
    end: Mapping[int, int],
    limit: int,
    size_of: Callable[[int, int], int],
) -> Offset:
    """Advance by up to `limit` bytes, one batch from each shard in turn, and by one batch at least.

    `size_of(shard, sequence)` returns the bytes of a batch.
    """
    reached = dict(start)
    used = 0
    unfinished = [shard for shard in start if end[shard] > start[shard]]
    while unfinished:
        for shard in list(unfinished):
            size = size_of(shard, reached[shard])
            if used and used + size > limit:
                return reached
            used += max(1, size)
            reached[shard] += 1
            if reached[shard] >= end[shard]:
                unfinished.remove(shard)
    return reached
