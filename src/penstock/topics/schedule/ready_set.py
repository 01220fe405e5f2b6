"""The choice of the topic that is served next: bands by priority, with a fair share and no starvation.

The unit is a topic with something to deliver. It is in the set at most once, however often it is written to,
so the set is no larger than the number of topics. Each band is served in proportion to its weight (deficit
round robin), first come first served within it. The priority of a waiting topic rises by 100 per second, up
to 1000 after 10 s, until it is served. Every band with work gets a share of every round, unless the lowest is
paused. The priority depends on the topic's configuration, its readers, and its waiting time.
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
"""The idle time from which a topic counts as unread."""
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
    """Return the current priority.

    A topic without a configured priority gets up to 500 while it is read, halved for every 30 s without a
    reader. A topic that waits since `enqueued_ms` rises by 100 per second, up to 1000. None leaves this out.
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
"""The lowest priority of each band and its weight, from the highest band down."""
_LOWEST: Final = len(BANDS) - 1


def band_of(priority: float) -> int:
    """Return the number of the band; 0 is the highest."""
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
    """The topics with work, each once. The caller passes the time."""

    def __init__(self) -> None:
        self._places: dict[T, _Place[T]] = {}
        self._bands: list[deque[_Place[T]]] = [deque() for _ in BANDS]
        self._credit = [0] * len(BANDS)
        self._at = 0
        self.is_lowest_paused = False
        """Whether topics of negative priority wait until they rise into another band."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def paused(self) -> list[T]:
        """Return the topics that wait because the lowest band is paused."""
        return [place.item for place in self._bands[_LOWEST]] if self.is_lowest_paused else []

    @property
    def servable(self) -> int:
        """Return how many topics can be taken now."""
        return len(self._places) - (len(self._bands[_LOWEST]) if self.is_lowest_paused else 0)

    def mark(self, item: T, priority: int, now_ms: int, *, lowered: bool = False) -> bool:
        """Add an item that has work. Return False if it already waits; then it keeps its place.

        `lowered` puts it one band below its priority.
        """
        if item in self._places:
            return False
        place = _Place(item, priority, lowered, now_ms, 0)
        place.band = place.band_at(now_ms)
        self._places[item] = place
        self._bands[place.band].append(place)
        return True

    def discard(self, item: T) -> None:
        """Remove an item that no longer has work."""
        place = self._places.pop(item, None)
        if place is not None:
            self._bands[place.band].remove(place)

    def take(self, now_ms: int) -> tuple[T, int] | None:
        """Return the next item and its waiting time in ms, or None if none can be served."""
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
        """Move to the next lower band. After the last one, a new round gives credit to bands with work."""
        self._credit[self._at] = 0
        self._at += 1
        if self._at == len(BANDS):
            self._at = 0
            self._credit = [weight if self._may_serve(band) else 0 for band, (_, weight) in enumerate(BANDS)]

    def age(self, now_ms: int) -> None:
        """Move items that have waited long enough to higher bands, in order of arrival."""
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
        """Insert an item in order of arrival.

        It has usually waited longest, so its place is near the front.
        """
        queue = self._bands[place.band]
        at = next((n for n, other in enumerate(queue) if other.since_ms > place.since_ms), len(queue))
        queue.insert(at, place)
