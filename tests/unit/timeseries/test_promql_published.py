"""The results that the Prometheus project publishes for its own tests, from a database in memory.

Differences are listed with their reasons in `tests/golden/promql` and in `docs/reference/promql.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from tests.unit.timeseries.database_doubles import disk, opened
from tests.unit.timeseries.promql_doubles import labels_of, values_of
from tests.unit.timeseries.promql_expectations import Case, DataSet, answered_series, data_sets

from penstock.errors import PenstockError
from penstock.timeseries import Labels, Samples, Series, TimeSeries
from penstock.timeseries.api import error_answer
from penstock.timeseries.promql import QueryResult, ResultSeries, ResultType

SETS = list(data_sets())
PRECISION = 1e-6
"""Relative tolerance of comparisons, given the rounding of the published figures."""


@pytest.mark.parametrize("data", SETS, ids=[one.place for one in SETS])
async def test_published_expectations_hold(data: DataSet) -> None:
    async with await opened(disk().open()) as database:
        if data.series:
            await database.write([_series(*one) for one in data.series])
            await database.sync()
        wrong = [text for case in data.cases if (text := await _difference(database, case))]
    assert not wrong, "\n".join(wrong)


def test_a_few_hundred_expectations_are_published_and_few_differ() -> None:
    cases = [case for one in SETS for case in one.cases]
    assert len(cases) > 500
    assert sum(bool(case.differs) for case in cases) < 20


async def _difference(database: TimeSeries, case: Case) -> str:
    """Return the difference between the result and the expectation of a case, or an empty text."""
    agrees, seen = await _agrees(database, case)
    if agrees and case.differs:
        return f"{case.place}: {case.query} agrees by now: take the line `differs` away"
    return "" if agrees or case.differs else f"{case.place}: {case.query}\n  is {seen}\n  not {case.answer}"


async def _agrees(database: TimeSeries, case: Case) -> tuple[bool, str]:
    try:
        if case.step_ms is None:
            result = await database.query(case.query, case.start_ms)
        else:
            result = await database.query_range(case.query, case.start_ms, case.end_ms, case.step_ms)
    except PenstockError as error:
        return _is_the_error(case.answer, error), f"{type(error).__name__}: {error}"
    series = ", ".join(f"{one.labels} {one.values.tolist()}" for one in result.series)
    return _is_the_answer(case, result), f"{result.result_type.value} {series}{result.text}"


def _is_the_error(wanted: str, error: PenstockError) -> bool:
    word, _, rest = wanted.partition(" ")
    if word == "refused":
        return error_answer(error).status == 422 and f"{rest!r} is not supported" in str(error)
    return word == "fails" and rest in str(error)


def _is_the_answer(case: Case, result: QueryResult) -> bool:
    wanted = case.answer
    if wanted.startswith(("fails", "refused")):
        return False
    if wanted == "nothing":
        return not result.series
    if result.result_type is ResultType.STRING:
        return wanted == f'"{result.text}"'
    if result.result_type is ResultType.SCALAR:
        return "}" not in wanted and _close(result.series[0].values[0], float(wanted))
    return _are_the_series(case, wanted, result.series)


def _are_the_series(case: Case, wanted: str, series: Sequence[ResultSeries]) -> bool:
    ordered, with_times = wanted.startswith("in order "), wanted.startswith("samples ")
    published = answered_series(wanted.removeprefix("in order ").removeprefix("samples "))
    found = [
        (one.labels, dict(zip(one.timestamps.tolist(), one.values.tolist(), strict=True))) for one in series
    ]
    expected = [
        (labels, _timed(words) if with_times else _stepped(case, words)) for labels, words in published
    ]
    if not ordered:
        found.sort(key=lambda one: one[0])
        expected.sort(key=lambda one: one[0])
    return len(found) == len(expected) and all(map(_same, found, expected))


def _timed(words: list[str]) -> dict[int, float]:
    return {int(float(at) * 1000): float(value) for value, _, at in (word.partition("@") for word in words)}


def _stepped(case: Case, words: list[str]) -> dict[int, float]:
    values = values_of(" ".join(words))
    times = range(case.start_ms, case.end_ms + 1, case.step_ms or 1)
    return {time: value for time, value in zip(times, values, strict=True) if value is not None}


def _same(found: tuple[Labels, dict[int, float]], expected: tuple[Labels, dict[int, float]]) -> bool:
    if found[0] != expected[0] or found[1].keys() != expected[1].keys():
        return False
    return all(_close(value, expected[1][at]) for at, value in found[1].items())


def _close(found: float, expected: float) -> bool:
    if math.isnan(found) or math.isnan(expected):
        return math.isnan(found) and math.isnan(expected)
    return math.isclose(found, expected, rel_tol=PRECISION, abs_tol=1e-12)


def _series(apart_ms: int, labels: str, values: str) -> Series:
    samples = [(at * apart_ms, value) for at, value in enumerate(values_of(values)) if value is not None]
    return Series(labels=labels_of(labels), samples=Samples.of(samples))
