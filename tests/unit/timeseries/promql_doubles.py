"""Series in the notation `start+step x count`, and one-line queries over them."""

from __future__ import annotations

import re

import numpy as np

from penstock.timeseries import Labels, MatchOp, Samples, Series
from penstock.timeseries.model import STALE_MARKER
from penstock.timeseries.promql import Engine, QueryResult, StaticSource, parse_selector

MINUTE_MS = 60_000
ENGINE = Engine()


def values_of(notation: str) -> list[float | None]:
    """Parse values: `0+10x3` is 0 10 20 30, `5x2` is 5 5 5, `_` is a missing sample, `stale` is the
    marker."""
    values: list[float | None] = []
    for word in notation.split():
        ramp = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?x(\d+)", word)
        if ramp:
            start, step, count = float(ramp[1]), float(ramp[2] or 0), int(ramp[3])
            values += [start + step * number for number in range(count + 1)]
        else:
            values.append(None if word == "_" else float(STALE_MARKER) if word == "stale" else float(word))
    return values


def labels_of(selector: str) -> Labels:
    matchers = parse_selector(selector)
    assert all(matcher.op is MatchOp.EQUAL for matcher in matchers)
    return Labels.of((matcher.name, matcher.value) for matcher in matchers)


def load(series: dict[str, str], step_ms: int = MINUTE_MS, start_ms: int = 0) -> StaticSource:
    """Return a source of series, from selectors and the notation of their values, `step_ms` apart."""
    loaded = []
    for selector, notation in series.items():
        pairs = [
            (start_ms + number * step_ms, value)
            for number, value in enumerate(values_of(notation))
            if value is not None
        ]
        loaded.append(Series(labels=labels_of(selector), samples=Samples.of(pairs)))
    return StaticSource(loaded)


def at(source: StaticSource, query: str, minute: float) -> dict[str, float]:
    """Return the vector of an instant query: values by labels as text, in the order of the result."""
    result = ENGINE.instant(query, round(minute * MINUTE_MS)).evaluate(source)
    return {str(series.labels): float(series.values[0]) for series in result.series}


def number_at(source: StaticSource, query: str, minute: float) -> float:
    """Return the only value of an instant query."""
    (value,) = at(source, query, minute).values()
    return value


def over(
    source: StaticSource, query: str, start: float, end: float, step: float = 1
) -> dict[str, list[float]]:
    """Return the values of a range query in minutes, with NaN where a series has no point."""
    result = ranged(source, query, start, end, step)
    times = np.arange(round(start * MINUTE_MS), round(end * MINUTE_MS) + 1, round(step * MINUTE_MS))
    found = {}
    for series in result.series:
        points = dict(zip(series.timestamps.tolist(), series.values.tolist(), strict=True))
        found[str(series.labels)] = [points.get(int(time), float("nan")) for time in times]
    return found


def ranged(source: StaticSource, query: str, start: float, end: float, step: float = 1) -> QueryResult:
    edges = (round(start * MINUTE_MS), round(end * MINUTE_MS), round(step * MINUTE_MS))
    return ENGINE.range(query, *edges).evaluate(source)
