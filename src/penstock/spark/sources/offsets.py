"""The positions of streams: the next number of every shard, core or topic. Plain arithmetic, no I/O.

An offset has a number for each key, and for most keys a mark: a fingerprint of the entry just before that
number. Numbers start over in a queue, directory or topic that is deleted and created again. Marks do not
repeat, so a mark shows that a checkpoint belongs to another source even if the numbers fit. If a mark is
missing, only the numbers are checked.

Spark compares offsets as text. Keys are therefore always sorted, and a stream without new records returns its
start offset unchanged. The offset of a queue, `{"0": 17, "after": {"0": "ingest/01J….batch"}}`, has the first
unread sequence and the location of the entry before it. A queue without shards has only shard 0. The same is
true before the producers of a sharded queue store the number of shards: `{"0": 0}` is the beginning of any
queue.
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
"""A map of shards or cores to their first unread number."""
StoredOffset: TypeAlias = dict[str, object]
"""An offset as it is stored in the checkpoint."""
Place: TypeAlias = int | Literal["earliest", "latest"]
Position: TypeAlias = Place | Mapping[int, Place]
"""One position for all shards, or one for each."""


class QueueGap(Corrupt):
    """The queue no longer has the entries that the checkpoint needs, or is another queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The range of entries in a shard, core or topic: `first` to `following - 1`."""

    first: int
    following: int


def following_of(bounds: Mapping[K, Bounds]) -> dict[K, int]:
    """Return the number after the last entry of every key."""
    return {key: held.following for key, held in bounds.items()}


class Offsets(ABC, Generic[K, M]):
    """The encoder, decoder and checks for the offsets of one source.

    A subclass provides the names for messages, the JSON fields, and the types of keys and marks.
    """

    gap: type[Corrupt]
    """The error for an offset that cannot belong to this source."""
    another: str
    """Possible causes of a gap, and the remedy."""
    numbers_field: str | None = "next"
    """The JSON field of the numbers. None: they are on the top level, next to the marks."""
    marks_field: str = "after"

    @abstractmethod
    def key(self, text: str) -> K:
        """Parse a key. Raise `ValueError` if it is invalid."""

    @abstractmethod
    def mark(self, value: object) -> M:
        """Return a mark as its type. Raise `ValueError` or `TypeError` if it is invalid."""

    @abstractmethod
    def name(self, key: K, count: int) -> str:
        """Return the name of one of `count` keys, for messages."""

    def write(self, numbers: Mapping[K, int], marks: Mapping[K, M] | None = None) -> StoredOffset:
        """Return the offset in the form that Spark stores."""
        plain = {str(key): numbers[key] for key in sorted(numbers)}
        stored: StoredOffset = {**plain} if self.numbers_field is None else {self.numbers_field: plain}
        if marks:
            stored[self.marks_field] = {str(key): marks[key] for key in sorted(marks)}
        return stored

    def read(self, stored: object) -> tuple[dict[K, int], dict[K, M]]:
        """Return the numbers and the marks in a checkpoint.

        Raise `gap` if the checkpoint belongs to another kind of source.
        """
        try:
            if not isinstance(stored, Mapping):  # a checkpoint of another kind of source
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
        """Return the position as numbers. Raise `ConfigError` for missing or unknown keys."""
        if isinstance(position, int) and len(bounds) > 1:
            held = ", ".join(self.name(key, len(bounds)) for key in sorted(bounds))
            raise ConfigError(f"{option}: {held} have separate numbers; give JSON with all of them")
        places = position if isinstance(position, Mapping) else dict.fromkeys(bounds, position)
        self.check_keys(places, bounds, option)
        return {key: _at(places.get(key, "earliest"), bounds[key]) for key in sorted(bounds)}

    def check_keys(self, given: Collection[K], bounds: Mapping[K, Bounds], option: str) -> None:
        """Raise `ConfigError` unless a position contains exactly the keys of the source."""
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
        """Return the start and the end of a batch query.

        Raise `ConfigError` if the start is after the end, and the errors of `resolve` and `check_requested`.
        """
        start = self.resolve(starting, bounds, "startingOffsets")
        end = self.resolve(ending, bounds, "endingOffsets")
        self.check_requested(start, bounds, "startingOffsets", earlier=earlier)
        self.check_requested(end, bounds, "endingOffsets", earlier=earlier)
        for key, number in start.items():
            if number > end[key]:
                name = self.name(key, len(start))
                raise ConfigError(f"startingOffsets {number} is after endingOffsets {end[key]} in {name}")
        return start, end

    def check_requested(
        self, requested: Mapping[K, int], bounds: Mapping[K, Bounds], option: str, *, earlier: bool = True
    ) -> None:
        """Raise `InvalidInput` unless the source has reached every number in the user's option.

        Without `earlier`, the source must also still have each of them.
        """
        for key, held in bounds.items():
            number, name = requested[key], self.name(key, len(bounds))
            if (0 if earlier else held.first) <= number <= held.following:
                continue
            raise InvalidInput(
                f"{option}: {name} holds {held.first} to {held.following - 1}; {number} is outside"
                if held.following > held.first
                else f"{option}: {name} is empty and continues at {held.following}; {number} is outside"
            )

    def check_reached(self, numbers: Mapping[K, int], bounds: Mapping[K, Bounds]) -> None:
        """Raise `gap` if the checkpoint is ahead of the source and therefore belongs to another one."""
        for key, held in bounds.items():
            if numbers[key] > held.following:
                raise self.gap(
                    f"the checkpoint has read {self.name(key, len(bounds))} up to {numbers[key] - 1}, but it "
                    f"has handed out numbers only up to {held.following - 1}: {self.another}"
                )

    def check_order(self, start: Mapping[K, int], end: Mapping[K, int]) -> None:
        """Raise `gap` if a micro-batch would end before it starts.

        It would be empty, and the records planned for it would be lost.
        """
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
        """Return the numbers for all shards. Raise `QueueGap` unless the keys are the queue's shards.

        An offset at 0 with fewer shards is from before the queue had its shards. All of them then start at 0.
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
        """Raise `QueueGap` if the last read entry now has another location, so this is another queue.

        `location_of(shard, sequence)` returns None for an entry that is no longer known. It is not checked.
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
    """Return whether all positions are 0 and cover only some of the shards."""
    return bool(places) and set(places) < set(shards) and all(place == 0 for place in places.values())


def spread_start(position: Position, shards: Collection[int]) -> Position:
    """Return a start at 0, from before the queue had its shards, for all shards.

    Return any other position unchanged.
    """
    places: Mapping[int, Place] = position if isinstance(position, Mapping) else {0: position}
    return dict.fromkeys(shards, 0) if _is_nothing(places, shards) else position


def sequence_of(value: object) -> int:
    """Return a sequence from a checkpoint or an option. Raise `ValueError` if it is invalid."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a sequence")
    return value


def parse_position(text: str, option: str) -> Position:
    """Parse `earliest`, `latest`, a sequence, or JSON with one of them for each shard.

    Raise `ConfigError` for other text.
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

    Raise `ConfigError` for other text; its message uses `number` and `example`.
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
    """Return the number of entries after `offset`. A key that is not in `following` has none."""
    return sum(max(0, following.get(key, place) - place) for key, place in offset.items())


def admit(start: Mapping[K, int], end: Mapping[K, int], limit: int) -> dict[K, int]:
    """Advance from `start` towards `end` by `limit` entries, taken evenly from all keys.

    The share that a short key does not use goes to the others. If less than one entry per key is left, the
    keys with the longest backlog get the rest.
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
    """Advance by up to `limit` bytes but at least one batch, taking one batch from each shard in turn.

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
