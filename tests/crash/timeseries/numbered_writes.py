"""Numbered writes, as from a queue, and the expected content of a database after some of them."""

from __future__ import annotations

from tests.unit.timeseries.database_doubles import HOUR_MS, contents, series

from penstock.timeseries import Series, TimeSeries

__all__ = ["expected", "left", "write"]


def write(number: int) -> list[Series]:
    """Return one write over two hours, with its own series in each hour and one that all writes share."""
    return [
        series("own", (number, float(number)), n=str(number)),
        series("own", (HOUR_MS + number, float(number)), n=str(number)),
        series(
            "shared", (number, float(number)), (HOUR_MS + number, float(number)), (HOUR_MS - 1, float(number))
        ),
    ]


def expected(count: int) -> dict[str, dict[int, float]]:
    """Return the content after the first `count` writes."""
    found = {
        f'own{{n="{number}"}}': {number: float(number), HOUR_MS + number: float(number)}
        for number in range(count)
    }
    if count:
        found["shared{}"] = {
            at: float(at % HOUR_MS) for number in range(count) for at in (number, HOUR_MS + number)
        }
        found["shared{}"][HOUR_MS - 1] = float(count - 1)
    return found


async def left(database: TimeSeries) -> int:
    """Return the number of stored writes, and check that each is stored completely or not at all."""
    position = database._directory.source.position
    sequence = None if position is None else position.sequence
    count = 0 if sequence is None else sequence + 1
    assert await contents(database) == expected(count)
    return count
