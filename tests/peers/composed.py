"""Queries made of parts by chance, the same ones on every run: what no list of examples thinks of.

Left out is what `differences` tells apart: counters near their start, dates of what is no time, deviations of
a single infinity. So are `topk` and `bottomk`, because of equal values any may be taken, and steps such as
`ceil`, where the last digit of a mean decides.
"""

from __future__ import annotations

import random
from typing import Final

__all__ = ["composed"]

_METRICS: Final = (
    "requests_total", 'requests_total{code="500"}', "temperature", 'temperature{instance!="c"}',
    "capacity", "ending", 'special{kind=~"nan|inf|minus"}', 'latency_seconds_bucket{instance="a"}',
    "latency_seconds_count",
)  # fmt: skip
_LABELS: Final = ("job", "instance", "code", "zone", "le", "kind", "nosuch")
_SHIFTS: Final = (
    "",
    "",
    "",
    " offset 3m",
    " offset -90s",
    " @ 1700002507",
    " @ end()",
    " @ start() offset 1m",
)
_OVER_TIME: Final = (
    "delta", "irate", "idelta", "resets", "changes", "sum_over_time", "avg_over_time",
    "min_over_time", "max_over_time", "count_over_time", "last_over_time", "present_over_time",
)  # fmt: skip
_OF_EACH: Final = ("abs", "exp", "sqrt", "cos", "atan", "-", "sort", "timestamp")
_AGGREGATIONS: Final = ("sum", "avg", "min", "max", "count", "group", "quantile")
_ARITHMETIC: Final = ("+", "-", "*", "/", "%", "^")
_COMPARISONS: Final = ("==", "!=", ">", "<", ">=", "<=")
_SETS: Final = ("and", "or", "unless")


def composed(count: int, seed: int) -> list[str]:
    """So many queries, each of a few parts."""
    rng = random.Random(seed)
    return [_vector(rng, rng.randrange(1, 4)) for _ in range(count)]


def _vector(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(_METRICS) + rng.choice(_SHIFTS)
    made = rng.choice(
        (_of_each, _over_time, _aggregated, _aggregated, _binary, _binary, _with_number, _labelled)
    )
    return made(rng, depth - 1)


def _of_each(rng: random.Random, depth: int) -> str:
    return f"{rng.choice(_OF_EACH)}({_vector(rng, depth)})"


def _over_time(rng: random.Random, depth: int) -> str:
    function = rng.choice(_OVER_TIME)
    if rng.random() < 0.2:
        return f"{rng.choice(('rate', 'increase'))}(requests_total[{rng.choice(('1m', '5m'))}])"
    if rng.random() < 0.5:
        return f"{function}({rng.choice(_METRICS)}[{rng.choice(('37s', '2m', '5m'))}]{rng.choice(_SHIFTS)})"
    # No range is a multiple of its step, so that no step stands on an edge.
    return (
        f"{function}(({_vector(rng, depth)})[{rng.choice(('4m10s:1m', '3m20s:30s'))}]{rng.choice(_SHIFTS)})"
    )


def _aggregated(rng: random.Random, depth: int) -> str:
    op = rng.choice(_AGGREGATIONS)
    grouping = f"{rng.choice(('by', 'without'))} ({_names(rng)})" if rng.random() < 0.7 else ""
    parameter = "0.3, " if op == "quantile" else ""
    return f"{op} {grouping} ({parameter}{_vector(rng, depth)})"


def _binary(rng: random.Random, depth: int) -> str:
    kind = rng.choice((_ARITHMETIC, _ARITHMETIC, _COMPARISONS, _SETS))
    op = rng.choice(kind)
    if kind is _COMPARISONS and rng.random() < 0.4:
        op += " bool"
    if rng.random() < 0.7:
        op += f" {rng.choice(('on', 'ignoring'))} ({_names(rng)})"
        if kind is not _SETS and rng.random() < 0.5:
            op += f" {rng.choice(('group_left', 'group_right'))} ({rng.choice(('', '', 'zone'))})"
    return f"({_vector(rng, depth)}) {op} ({_vector(rng, depth)})"


def _with_number(rng: random.Random, depth: int) -> str:
    op = rng.choice((*_ARITHMETIC, *_COMPARISONS))
    number = rng.choice(("2", "0", "-3.5", "20", "NaN", "scalar(capacity{job='api'})", "time() / 1e8"))
    sides = [f"({_vector(rng, depth)})", number]
    rng.shuffle(sides)
    return f" {op} ".join(sides)


def _labelled(rng: random.Random, depth: int) -> str:
    inner, names = _vector(rng, depth), [rng.choice(_LABELS) for _ in range(2)]
    if rng.random() < 0.5:
        return f'label_replace({inner}, "{names[0]}", "x$1", "{names[1]}", "(.)(.*)")'
    return f'label_join({inner}, "{names[0]}", "-", "{names[1]}", "job")'


def _names(rng: random.Random) -> str:
    return ", ".join(rng.sample(_LABELS[:5], rng.randrange(4)))
