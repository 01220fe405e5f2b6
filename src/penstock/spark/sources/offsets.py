"""Where a stream stands: the next sequence of every shard. Plain arithmetic, no I/O.

An offset travels as JSON, `{"0": 17, "after": {"0": "ingest/01J….batch"}}`: shard to the first sequence that
has not been read, and under `after` the location of the entry just before it. Numbers start over in every
queue and locations never repeat, so `after` tells a checkpoint that it was brought to another queue even
when the numbers fit. It is absent for a shard of which no entry is known, and in offsets that were written
without it; then only the numbers are checked.

Spark compares offsets as text: shards always stand in numeric order, `after` comes last, and a stream that
has nothing new answers with the very offset it was asked about. A queue without shards is shard 0 alone, and
so is one whose producers have yet to say how many it has: `{"0": 0}` is the beginning of any queue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

from penstock.errors import ConfigError, Corrupt, InvalidInput

K = TypeVar("K")

Offset: TypeAlias = dict[int, int]
After: TypeAlias = dict[int, str]
"""Shard to the location of the last entry that was read."""
StoredOffset: TypeAlias = dict[str, "int | dict[str, str]"]
"""As it stands in the checkpoint."""
Place: TypeAlias = int | Literal["earliest", "latest"]
Position: TypeAlias = Place | Mapping[int, Place]
"""One place for every shard, or one each."""

_AFTER: Final = "after"
_ANOTHER: Final = (
    "the manifest was deleted and made anew, or the checkpoint belongs to another queue. "
    "Point the query at its own queue, or start with a new checkpoint"
)


class QueueGap(Corrupt):
    """The queue no longer holds what the checkpoint asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a shard holds: entries `first` to `following - 1`."""

    first: int
    following: int


def write_offset(offset: Mapping[int, int], after: Mapping[int, str] | None = None) -> StoredOffset:
    """As Spark stores it."""
    stored: StoredOffset = {str(shard): offset[shard] for shard in sorted(offset)}
    if after:
        stored[_AFTER] = {str(shard): after[shard] for shard in sorted(after)}
    return stored


def read_offset(stored: Mapping[str, object], shards: Sequence[int], queue: str) -> Offset:
    """The numbers in a checkpoint. Raises `QueueGap` if they cannot be those of this queue.

    One that has read nothing, of fewer shards, is from before the queue had them: all begin at 0.
    """
    if not isinstance(stored, Mapping):  # another kind of source stores what it likes
        raise _no_offset(stored, queue)
    try:
        offset = {int(shard): sequence_of(place) for shard, place in stored.items() if shard != _AFTER}
    except (TypeError, ValueError) as error:
        raise _no_offset(stored, queue) from error
    if not stored.get(_AFTER) and _is_nothing(offset, shards):
        return dict.fromkeys(sorted(shards), 0)
    if sorted(offset) != sorted(shards):
        raise QueueGap(f"the checkpoint knows {len(offset)} shards, {queue} has {len(shards)}: {_ANOTHER}")
    return dict(sorted(offset.items()))


def _is_nothing(places: Mapping[int, Place], shards: Collection[int]) -> bool:
    """Whether these are zeros for some of the shards only."""
    return bool(places) and set(places) < set(shards) and all(place == 0 for place in places.values())


def read_after(stored: Mapping[str, object], queue: str) -> After:
    """The locations in a checkpoint; empty in one that has none. Raises `QueueGap` as `read_offset` does."""
    after = stored.get(_AFTER, {})
    try:
        if not isinstance(after, Mapping):
            raise TypeError(f"{after!r} names no locations")
        return {sequence_of(int(shard)): _location(location) for shard, location in after.items()}
    except (TypeError, ValueError) as error:
        raise _no_offset(stored, queue) from error


def _no_offset(stored: object, queue: str) -> QueueGap:
    return QueueGap(f"the checkpoint holds {stored!r}, which is no offset of {queue}: {_ANOTHER}")


def _location(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no location")
    return value


def sequence_of(value: object) -> int:
    """A number in a checkpoint or an option, checked. Raises `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no sequence")
    return value


def parse_position(text: str, option: str) -> Position:
    """`earliest`, `latest`, a sequence, or JSON with one of them per shard. Raises `ConfigError`."""
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
    """`earliest`, `latest`, a number from `first` on, or JSON with one of them per key.

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
        raise ValueError(f"numbers begin at {first}")
    return place


def spread_start(position: Position, shards: Collection[int]) -> Position:
    """A start at 0 that was given before the queue had its shards, for all of them; any other as it is."""
    places: Mapping[int, Place] = position if isinstance(position, Mapping) else {0: position}
    return dict.fromkeys(shards, 0) if _is_nothing(places, shards) else position


def resolve(position: Position, bounds: Mapping[int, Bounds], option: str) -> Offset:
    """The position in numbers. Raises `ConfigError` for shards that are missing or do not exist."""
    if isinstance(position, int) and len(bounds) > 1:
        raise ConfigError(
            f"{option}: each of the queue's {len(bounds)} shards has its own numbers; give JSON with all"
        )
    places = position if isinstance(position, Mapping) else dict.fromkeys(bounds, position)
    if sorted(places) != sorted(bounds):
        raise ConfigError(f"{option}: the queue has the shards 0 to {max(bounds)}; name each of them once")
    return {shard: _at(places[shard], bounds[shard]) for shard in sorted(bounds)}


def _at(place: Place, bounds: Bounds) -> int:
    if isinstance(place, int):
        return place
    return bounds.first if place == "earliest" else bounds.following


def check_identity(
    offset: Mapping[int, int],
    after: Mapping[int, str],
    location_of: Callable[[int, int], str | None],
    queue: str,
) -> None:
    """Raise `QueueGap` if the last entry that was read stands elsewhere: this is another queue.

    `location_of(shard, sequence)` is None for an entry that nobody remembers, which is then taken on trust.
    """
    for shard, location in after.items():
        last = offset.get(shard, 0) - 1
        found = location_of(shard, last) if last >= 0 else None
        if found is not None and found != location:
            raise QueueGap(
                f"the checkpoint has read {_name(queue, shard, len(offset))} up to {last}, which was "
                f"{location}, but {found} stands there: {_ANOTHER}"
            )


def check_reached(offset: Mapping[int, int], bounds: Mapping[int, Bounds], queue: str) -> None:
    """Raise `QueueGap` if the checkpoint is ahead of the queue: this is another queue."""
    for shard, held in bounds.items():
        if offset[shard] > held.following:
            raise QueueGap(
                f"the checkpoint has read {_name(queue, shard, len(bounds))} up to {offset[shard] - 1}, but "
                f"it has handed out numbers only up to {held.following - 1}: {_ANOTHER}"
            )


def check_order(start: Mapping[int, int], end: Mapping[int, int], queue: str) -> None:
    """Raise `QueueGap` if the start lies behind the end: such a micro-batch would be empty, and what was
    planned for it lost."""
    for shard, place in start.items():
        if place > end[shard]:
            raise QueueGap(
                f"the micro-batch of {_name(queue, shard, len(start))} would begin at {place} and end at "
                f"{end[shard]}: the starting position has moved since the first micro-batch was planned. "
                "Give startingOffsets as a number, or start with a new checkpoint"
            )


def check_held(start: Mapping[int, int], bounds: Mapping[int, Bounds], queue: str) -> None:
    """Raise `QueueGap` if what comes next has left the queue."""
    for shard, held in bounds.items():
        if start[shard] < held.first:
            raise QueueGap(
                f"{_name(queue, shard, len(bounds))} begins at {held.first}, but {start[shard]} comes next "
                f"in this query: somebody else has acknowledged what lies between, or {_ANOTHER}. To go on "
                "and keep a row that tells what is missing, set onGap=record"
            )


def _name(queue: str, shard: int, shards: int) -> str:
    return queue if shards == 1 else f"shard {shard} of {queue}"


def check_asked(
    asked: Mapping[int, int],
    bounds: Mapping[int, Bounds],
    option: str,
    queue: str,
    *,
    earlier: bool = False,
) -> None:
    """Raise `InvalidInput` unless every number the user gave lies within the queue.

    With `earlier` a number that the queue no longer holds will do as well.
    """
    for shard, held in bounds.items():
        lowest = 0 if earlier else held.first
        if not lowest <= asked[shard] <= held.following:
            name = _name(queue, shard, len(bounds))
            raise InvalidInput(
                f"{option}: {name} holds the sequences {held.first} to {held.following - 1}; "
                f"{asked[shard]} is outside"
                if held.following > held.first
                else f"{option}: {name} is empty and continues at {held.following}; {asked[shard]} is outside"
            )


def cap(offset: Mapping[int, int], ceiling: Mapping[int, int]) -> Offset:
    """The lower of the two, shard by shard."""
    return {shard: min(place, ceiling[shard]) for shard, place in offset.items()}


def lift(offset: Mapping[int, int], floor: Mapping[int, int]) -> Offset:
    """The higher of the two, shard by shard."""
    return {shard: max(place, floor[shard]) for shard, place in offset.items()}


def backlog(offset: Mapping[int, int], following: Mapping[int, int]) -> int:
    """How many batches lie behind `offset`."""
    return sum(max(0, following[shard] - place) for shard, place in offset.items())


def admit_batches(start: Mapping[int, int], end: Mapping[int, int], limit: int) -> Offset:
    """As far from `start` towards `end` as `limit` batches go, taken evenly from all shards.

    What a short shard does not use goes to the others; when less than one each is left, the shards that
    are furthest behind get it.
    """
    left = limit
    taken = dict.fromkeys(start, 0)
    open_shards = [shard for shard in start if end[shard] > start[shard]]
    while left > 0 and open_shards:
        open_shards.sort(key=lambda shard: start[shard] + taken[shard] - end[shard])
        share = max(1, left // len(open_shards))
        for shard in open_shards:
            step = min(share, end[shard] - start[shard] - taken[shard], left)
            taken[shard] += step
            left -= step
        open_shards = [shard for shard in open_shards if start[shard] + taken[shard] < end[shard]]
    return {shard: place + taken[shard] for shard, place in start.items()}


def admit_bytes(
    start: Mapping[int, int],
    end: Mapping[int, int],
    limit: int,
    size_of: Callable[[int, int], int],
) -> Offset:
    """As far as `limit` bytes go, one batch from each shard in turn, and always one batch at least.

    `size_of(shard, sequence)` tells the bytes of a batch.
    """
    reached = dict(start)
    used = 0
    open_shards = [shard for shard in start if end[shard] > start[shard]]
    while open_shards:
        for shard in list(open_shards):
            size = size_of(shard, reached[shard])
            if used and used + size > limit:
                return reached
            used += max(1, size)
            reached[shard] += 1
            if reached[shard] >= end[shard]:
                open_shards.remove(shard)
    return reached
