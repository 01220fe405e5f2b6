"""How fast a counter grows, from two readings of it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

__all__ = ["Meter", "Trail", "rate_between"]

_SPAN_S: Final = 10.0
"""A rate is taken over about so long: steady enough to read, quick enough to follow."""


@dataclass(frozen=True, slots=True)
class _Point:
    at_s: float
    value: float


def rate_between(before: float, before_s: float, after: float, after_s: float) -> float | None:
    """Growth per second; None if no time has passed, or the counter has begun anew."""
    if after_s <= before_s or after < before:
        return None
    return (after - before) / (after_s - before_s)


class Meter:
    """A counter as it was over the last seconds. One that went back has begun anew, and so does its rate."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()

    def read(self, at_s: float, value: float | None) -> None:
        """A reading; None is a reading that failed, after which nothing is known."""
        points = self._points
        if value is None or (points and value < points[-1].value):
            points.clear()
        if value is None:
            return
        points.append(_Point(at_s, value))
        while len(points) > 2 and at_s - points[1].at_s >= _SPAN_S:
            points.popleft()

    @property
    def rate(self) -> float | None:
        """Per second over the last readings; None before there are two."""
        if len(self._points) < 2:
            return None
        first, last = self._points[0], self._points[-1]
        return rate_between(first.value, first.at_s, last.value, last.at_s)


class Trail:
    """The last so many points of a few numbers over time."""

    __slots__ = ("_points",)

    def __init__(self, length: int) -> None:
        self._points: deque[tuple[int, *tuple[float | None, ...]]] = deque(maxlen=length)

    def add(self, at_ms: int, *values: float | None) -> None:
        self._points.append((at_ms, *values))

    def points(self) -> list[tuple[int, *tuple[float | None, ...]]]:
        """Oldest first."""
        return list(self._points)
