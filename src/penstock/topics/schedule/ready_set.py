"""Which topic is served next: bands by priority, a fair share for each band, and no topic waits indefinitely.

The unit is a topic with something to deliver. It is in the set at most once, however often it is written to,
so the set is no larger than the number of topics. A band is drawn from in proportion to its weight (deficit
round robin), first come first served within it. A topic that waits rises by 100 a second, into higher bands,
until it is served: after 10 s by 1000. Every band with work gets a share in every round, unless the lowest is
paused. The priority of a topic is what its owner says, who reads it, and how long it has waited.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

_LIMIT: Final = 1000
_READ_BONUS: Final = 500
_HALF_LIFE_MS: Final = 30_000
_IDLE_MS_MAX: Final = 300_000
"""From here on a topic counts as unread."""
_AGEING_PER_MS: Final = 0.1
_AGEING_MS_MAX: Final = 10_000


def effective_priority(
    priority: int | None,
    *,
    auto_priority: bool,
    now_ms: int,
    last_consumed_ms: int | None,
    enqueued_ms: int | None = None,
) -> int:
    """The priority right now.

    Without one of its own a topic that is read gets up to 500, halved with every 30 s without a reader. What
    waits since `enqueued_ms` rises by 100 per second, up to 1000; None leaves that out.
    """
    total = float(max(-_LIMIT, min(_LIMIT, priority or 0)))
    if priority is None and auto_priority and last_consumed_ms is not None:
        idle_ms = max(0, now_ms - last_consumed_ms)
        if idle_ms < _IDLE_MS_MAX:
            total += _READ_BONUS * 2.0 ** (-idle_ms / _HALF_LIFE_MS)
    if enqueued_ms is not None:
        total += _AGEING_PER_MS * min(max(now_ms - enqueued_ms, 0), _AGEING_MS_MAX)
    return int(math.copysign(math.floor(abs(total) + 0.5), total))


T = TypeVar("T")

BANDS: Final = ((750, 8), (500, 4), (250, 2), (0, 1), (-(10**9), 1))
"""The least priority of each band and its weight, from the highest down."""
_LOWEST: Final = len(BANDS) - 1


def band_of(priority: float) -> int:
    """The number of the band, 0 for the highest."""
    for band, (least, _) in enumerate(BANDS):
        if priority >= least:
            return band
    return _LOWEST


@dataclass(slots=True)
class _Place(Generic[T]):
    item: T
    priority: int
    lowered: bool
    since_ms: int
    band: int

    def band_at(self, now_ms: int) -> int:
        aged = self.priority + _AGEING_PER_MS * min(max(now_ms - self.since_ms, 0), _AGEING_MS_MAX)
        return min(band_of(aged) + self.lowered, _LOWEST)


class ReadySet(Generic[T]):
    """Topics with work, each once. Time is passed in."""

    def __init__(self) -> None:
        self._places: dict[T, _Place[T]] = {}
        self._bands: list[deque[_Place[T]]] = [deque() for _ in BANDS]
        self._credit = [0] * len(BANDS)
        self._at = 0
        self.is_lowest_paused = False
        """Whether what has a negative priority waits, for as long as it does not rise into another band."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def paused(self) -> list[T]:
        """Those that wait because the lowest band does."""
        return [place.item for place in self._bands[_LOWEST]] if self.is_lowest_paused else []

    @property
    def servable(self) -> int:
        """How many could be taken now."""
        return len(self._places) - (len(self._bands[_LOWEST]) if self.is_lowest_paused else 0)

    def mark(self, item: T, priority: int, now_ms: int, *, lowered: bool = False) -> bool:
        """There is something to do for this item. False if it waits already: then it keeps its place.

        `lowered` puts it one band below that of its priority.
        """
        if item in self._places:
            return False
        place = _Place(item, priority, lowered, now_ms, 0)
        place.band = place.band_at(now_ms)
        self._places[item] = place
        self._bands[place.band].append(place)
        return True

    def discard(self, item: T) -> None:
        """It has nothing to do any more."""
        place = self._places.pop(item, None)
        if place is not None:
            self._bands[place.band].remove(place)

    def take(self, now_ms: int) -> tuple[T, int] | None:
        """The next one and how many milliseconds it waited; None when there is none that may be served."""
        for _ in range(2 * len(BANDS) + 1):
            band = self._at
            if self._credit[band] > 0 and self._may_serve(band):
                self._credit[band] -= 1
                place = self._bands[band].popleft()
                del self._places[place.item]
                return place.item, max(0, now_ms - place.since_ms)
            self._next_band()
        return None

    def _may_serve(self, band: int) -> bool:
        return bool(self._bands[band]) and not (band == _LOWEST and self.is_lowest_paused)

    def _next_band(self) -> None:
        """Turn to the band below. After the last one a new round gives new credit to bands with work."""
        self._credit[self._at] = 0
        self._at += 1
        if self._at == len(BANDS):
            self._at = 0
            self._credit = [weight if self._may_serve(band) else 0 for band, (_, weight) in enumerate(BANDS)]

    def age(self, now_ms: int) -> None:
        """Let those rise that have waited long enough; the order among them stays that of their arrival."""
        for band in range(1, len(BANDS)):
            if not self._bands[band]:
                continue
            rising = [place for place in self._bands[band] if place.band_at(now_ms) < band]
            if rising:
                self._bands[band] = deque(
                    place for place in self._bands[band] if place.band_at(now_ms) >= band
                )
            for place in rising:
                place.band = place.band_at(now_ms)
                self._enter_in_order(place)

    def _enter_in_order(self, place: _Place[T]) -> None:
        """A topic that rises has usually waited longest of all there: its place is near the front."""
        queue = self._bands[place.band]
        at = next((n for n, other in enumerate(queue) if other.since_ms > place.since_ms), len(queue))
        queue.insert(at, place)
