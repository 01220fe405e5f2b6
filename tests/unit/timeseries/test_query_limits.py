"""Limits of a query apply to all of it: the data it reads, its time, and the number of queries."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest
from tests.unit.timeseries.database_doubles import HOUR_MS, START_MS, disk, opened, series
from tests.unit.timeseries.promql_doubles import ENGINE, load

from penstock.coordinator import KeyValue, StorageRead
from penstock.errors import Unavailable
from penstock.testing.clock import ManualClock
from penstock.timeseries import TimeSeries
from penstock.timeseries.api import error_answer
from penstock.timeseries.matchers import Matcher, MatchOp, select_labels
from penstock.timeseries.model import Labels
from penstock.timeseries.promql import (
    Budget,
    Engine,
    EngineConfig,
    ExecutionError,
    ParseError,
    QueryTimeout,
    Selection,
    TooManySamples,
    parse_selector,
    vectors,
)
from penstock.timeseries.promql.limits import labels_cost
from penstock.timeseries.read import LabelCache, select

MINUTE_MS = 60_000


class TickingClock(ManualClock):
    """A clock that advances by one second on every read."""

    looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return float(self.looks)


class CountingRead:
    """A snapshot that counts the pages and values it returns."""

    def __init__(self, read: StorageRead) -> None:
        self._read = read
        self.pages = 0

    async def get(self, key: bytes) -> bytes | None:
        return await self._read.get(key)

    async def scan(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        async for page in self._read.scan(prefix, start=start, stop=stop):
            self.pages += 1
            yield page


async def filled(count: int = 200, samples: int = 10, **settings: object) -> TimeSeries:
    database = await opened(disk().open(), **settings)
    times = [(at * 1000, float(at)) for at in range(samples)]
    await database.write([series("up", *times, n=f"{n:04}") for n in range(count)])
    await database.sync()
    return database


def budget(samples_max: int = 1_000_000, timeout_s: float = 60.0, ticking: bool = False) -> Budget:
    clock = TickingClock() if ticking else ManualClock()
    return Budget(samples_max=samples_max, timeout_s=timeout_s, clock=clock)


async def test_samples_count_over_all_selectors_of_a_query() -> None:
    config = EngineConfig(samples_max=5000)
    async with await filled(100, 10, engine=config) as database:
        at_ms = START_MS + 20_000
        assert (await database.query("sum(up)", at_ms)).series
        many = " + ".join(f'sum(up{{n!="{n}"}})' for n in range(3))
        with pytest.raises(TooManySamples):
            await database.query(many, at_ms)


async def test_samples_are_charged_before_the_next_piece_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.timeseries.read._STREAM_BYTES_MAX", 100)
    async with await filled(100, 50, fold_blocks=1) as database:
        await database.write([series("up", (0, 0.0), n="0000")])
        await database.sync()  # earlier flushes are compacted into streams
        snapshot, buckets = database._within(None, None)
        spent = budget(samples_max=1200)  # of which the labels take 1000
        with pytest.raises(TooManySamples):
            await select(
                snapshot,
                buckets,
                Selection(parse_selector("up"), START_MS, START_MS + HOUR_MS),
                LabelCache(),
                spent,
            )
        assert spent.samples_used < 2000, "much more was decoded than allowed"


def test_selectors_of_the_same_series_share_what_they_read() -> None:
    near = ENGINE.range("x - x offset 2m", 0, 10 * MINUTE_MS, MINUTE_MS)
    assert [(one.start_ms, one.end_ms) for one in near.selections] == [(-7 * MINUTE_MS + 1, 10 * MINUTE_MS)]
    far = ENGINE.range("x - x offset 1d", 0, 10 * MINUTE_MS, MINUTE_MS)
    assert len(far.selections) == 2
    assert len(ENGINE.instant('x + x{a="b"}', 0).selections) == 2


async def test_what_is_shared_answers_as_if_each_had_read_for_itself() -> None:
    async with await opened(disk().open()) as database:
        ones = [series("x", *((at * MINUTE_MS, float(at)) for at in range(20)), a="1")]
        await database.write([*ones, series("x", (3 * MINUTE_MS, 7.0), a="2")])
        await database.sync()
        query = "sum_over_time(x[2m]) - sum_over_time(x[2m] offset 1m)"
        result = await database.query(query, START_MS + 10 * MINUTE_MS)
        assert [(str(one.labels), one.values.tolist()) for one in result.series] == [('{a="1"}', [2.0])]
        alone = await database.query("sum_over_time(x[3m])", START_MS + 10 * MINUTE_MS)
        made = 3 * 2 + 3 + 1  # cells of two windows of two series, of three nodes and of a pair
        assert result.samples_used < alone.samples_used + made, "what two selectors share is read once"


@pytest.mark.parametrize("selector", ["up", '{n=~".+"}'])
async def test_time_is_checked_for_every_page_that_is_read(selector: str) -> None:
    async with await filled(1000, 1) as database:
        snapshot, buckets = database._within(None, None)
        read = CountingRead(snapshot)
        selection = Selection(parse_selector(selector), START_MS, START_MS + HOUR_MS)
        with pytest.raises(QueryTimeout):
            await select(read, buckets, selection, LabelCache(), budget(timeout_s=4.0, ticking=True))
        assert read.pages <= 5


@pytest.mark.parametrize("query", ["sum_over_time(x[10m])", "max_over_time(x[10m])", "changes(x[10m])"])
def test_time_is_checked_between_pieces_of_work(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = load({"x": "0+1x500 3+1x500"})
    engine = Engine(EngineConfig(timeout="30s"), clock=TickingClock())
    assert engine.range(query, 0, 1000 * MINUTE_MS, MINUTE_MS).evaluate(source).series
    monkeypatch.setattr(vectors, "_BLOCK_CELLS_MAX", 100)
    monkeypatch.setattr(vectors, "_PIECE_ITEMS_MAX", 100)
    with pytest.raises(QueryTimeout):
        engine.range(query, 0, 1000 * MINUTE_MS, MINUTE_MS).evaluate(source)


def test_work_in_pieces_gives_the_result_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    source = load({'x{a="1"}': "0+1x50 3-1x50", 'x{a="2"}': "5 _ 3 9 _ _ 1+2x60"})
    prepared = [
        ENGINE.range(f"{name}(x[7m])", 0, 100 * MINUTE_MS, MINUTE_MS)
        for name in ("max_over_time", "min_over_time", "changes", "resets", "rate")
        for _ in range(2)
    ]
    whole = [one.evaluate(source) for one in prepared[::2]]
    monkeypatch.setattr(vectors, "_PIECE_ITEMS_MAX", 10)
    for result, piecewise in zip(whole, [one.evaluate(source) for one in prepared[1::2]], strict=True):
        for left, right in zip(result.series, piecewise.series, strict=True):
            np.testing.assert_array_equal(left.values, right.values)


READERS: dict[str, Callable[[TimeSeries], Awaitable[object]]] = {
    "query": lambda database: database.query("up", START_MS, timeout_s=0.05),
    "series": lambda database: database.series([parse_selector("up")]),
    "label_names": lambda database: database.label_names(),
    "label_values": lambda database: database.label_values("n"),
    "newest": lambda database: database.newest([parse_selector("up")], START_MS),
}


@pytest.mark.parametrize("reader", READERS)
async def test_a_reader_without_a_slot_is_unavailable(reader: str) -> None:
    async with await filled(2, 1, queries_max=1, engine=EngineConfig(timeout="50ms")) as database:
        async with database._place(budget()):
            with pytest.raises(Unavailable, match="query slots are in use") as caught:
                await READERS[reader](database)
        assert error_answer(caught.value).status == 503
        assert not database._querying.locked(), "the place is free again"


@pytest.mark.parametrize("reader", READERS)
async def test_a_store_that_does_not_answer_holds_a_reader_no_longer_than_its_time(
    reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await filled(2, 1, queries_max=1, engine=EngineConfig(timeout="50ms")) as database:
        _, buckets = database._within(None, None)
        with monkeypatch.context() as patched:
            patched.setattr(database, "_within", lambda start, end: (Silent(), buckets))
            with pytest.raises(QueryTimeout):
                await READERS[reader](database)
        assert not database._querying.locked(), "the place is free again"


class Silent:
    """A snapshot whose store does not respond."""

    async def get(self, key: bytes) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async def scan(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        await asyncio.Event().wait()
        yield []


def test_count_values_makes_no_label_that_could_not_be_stored() -> None:
    """The label's name is in the query, and the response repeats it for each value."""
    source = load({f'x{{n="{n}"}}': f"{n}" for n in range(200)})
    name = "v" * 16_380
    with pytest.raises(ExecutionError, match=r"count_values\(\) makes label .* too long: 16,38\d bytes"):
        ENGINE.instant(f'count_values("{name}", x * 100000)', 0).evaluate(source)
    assert len(ENGINE.instant('count_values("v", x)', 0).evaluate(source).series) == 200


@pytest.mark.parametrize("query", ['count_values("{}", x)', 'label_replace(x, "{}", "1", "", "")'])
def test_names_of_labels_that_a_query_makes_are_charged(query: str) -> None:
    source = load({f'x{{n="{n}"}}': f"{n}" for n in range(200)})
    short, long = (
        ENGINE.instant(query.format("v" * size), 0).evaluate(source).samples_used for size in (1, 11_001)
    )
    assert long >= short + 200 * 100


async def test_an_abandoned_query_ends_at_its_next_check_of_the_time() -> None:
    spent = budget()
    spent.check()
    spent.stop()
    with pytest.raises(QueryTimeout):
        spent.check()


async def test_series_and_names_are_charged() -> None:
    async with await filled(200, 1, engine=EngineConfig(samples_max=150)) as database:
        with pytest.raises(TooManySamples):
            await database.series([parse_selector("up")])
        with pytest.raises(TooManySamples):
            await database.label_values("n")
        assert await database.label_names() == {"__name__", "n"}


async def test_values_that_every_hour_has_are_charged_once() -> None:
    async with await opened(disk().open(), engine=EngineConfig(samples_max=50)) as database:
        times = [(hour * HOUR_MS, 1.0) for hour in range(20)]
        await database.write([series("up", *times, n=str(n)) for n in range(4)])
        await database.sync()
        assert await database.label_values("n") == {"0", "1", "2", "3"}
        assert len(await database.series()) == 4


async def test_a_limit_ends_the_reading_and_gives_the_first_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.timeseries.read._LIMITED_AT_ONCE", 50)
    async with await filled(1000, 1) as database:
        await database.write([series("up", (HOUR_MS, 1.0), n="0000a"), series("up", (HOUR_MS, 1.0), a="x")])
        await database.sync()
        values = await database.label_values("n", limit=3)
        assert sorted(values)[:3] == ["0000", "0000a", "0001"]
        assert len(values) < 10
        assert sorted(await database.label_names(limit=1))[:1] == ["__name__"]
        assert 2 <= len(await database.series(limit=2)) < 1000
        assert 2 <= len(await database.series([parse_selector("up")], limit=2)) < 1000
        assert len(await database.series([parse_selector("up")], limit=10_000)) == 1002


@pytest.mark.parametrize("query", ["x or y", "x and y", "x unless y", "x + on (b) group_left y"])
def test_what_operators_make_is_charged(query: str) -> None:
    ones = {f'x{{a="{n}",b="0"}}': "0+1x10" for n in range(10)}
    source = load({**ones, 'y{b="0"}': "1x10", 'y{b="1"}': "1x10"})
    alone = sum(
        ENGINE.range(one, 0, 10 * MINUTE_MS, MINUTE_MS).evaluate(source).samples_used for one in ("x", "y")
    )
    both = ENGINE.range(query, 0, 10 * MINUTE_MS, MINUTE_MS).evaluate(source).samples_used
    assert both >= alone + 10 * 11


def test_checking_for_several_matches_is_charged() -> None:
    source = load({'x{a="1"}': "1x10", 'y{a="1",b="1"}': "1x10", 'y{a="1",b="2"}': "1x10"})
    engine = Engine(EngineConfig(samples_max=80))
    with pytest.raises(TooManySamples):
        engine.range("x + on (a) y", 0, 10 * MINUTE_MS, MINUTE_MS).evaluate(source)
    with pytest.raises(ExecutionError):
        ENGINE.range("x + on (a) y", 0, 10 * MINUTE_MS, MINUTE_MS).evaluate(source)


@pytest.mark.parametrize(
    "query",
    ["+".join(["1"] * 60) + "]", "+".join(["1"] * 499) + "]", "(" * 99 + "a" * 20, 'x{a=~"(\\\\pL{100})"]'],
)
async def test_long_queries_are_not_parsed_on_the_event_loop(
    query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def parse(text: str) -> None:
        threads.append(threading.get_ident())
        raise ValueError("no query")

    monkeypatch.setattr("promql_parser.parse", parse)
    async with await opened(disk().open()) as database:
        for asking in (database.query(query), database.query_range(query, 0, 1, 1)):
            with pytest.raises(ParseError):
                await asking
    assert threads
    assert threading.get_ident() not in threads


def nested(levels: int, inner: str = "up", template: str = "$1$1$1$1") -> str:
    """Return a query whose label `a` becomes four times as long with every level."""
    query = f'label_replace({inner}, "a", "$1", "n", "(.*)")'
    for _ in range(levels):
        query = f'label_replace({query}, "a", "{template}", "a", "(.*)")'
    return query


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (
            nested(12),
            r"label_replace\(\) makes label 'a' too long: 16,385 bytes with its name; at most 16,384",
        ),
        ('label_replace(up, "a", "' + "$1" * 5000 + '", "n", "(.*)")', "20,000 characters; at most 16,384"),
        ('label_replace(up, "a", "' + "ä" * 9000 + '", "n", ".*")', "18,001 bytes with its name"),
        ('label_join(up, "a", "' + "-" * 9000 + '", "n", "n", "n")', r"label_join\(\) makes label 'a' too"),
    ],
)
async def test_a_query_makes_no_label_that_could_not_be_stored(query: str, reason: str) -> None:
    async with await filled(2, 1) as database:
        with pytest.raises(ExecutionError, match=reason):
            await database.query(query, START_MS + 1000)


async def test_a_query_makes_no_series_that_could_not_be_stored() -> None:
    long, query = "x" * 16_000, "up"
    query = f'label_replace({query}, "a", "{long}", "n", ".*")'
    for label in "bcde":
        query = f'label_replace({query}, "{label}", "$1", "a", "(.*)")'
    async with await filled(2, 1, engine=EngineConfig(samples_max=100_000_000)) as database:
        with pytest.raises(ExecutionError, match=r"labels of a series too long: .* at most 65,536"):
            await database.query(query, START_MS + 1000)


LONG = "x" * 11_000  # a hundred samples


@pytest.mark.parametrize(
    "query",
    [
        f'label_replace(up, "a", "{LONG}", "n", ".*")',
        f'label_join(up, "a", "{LONG}", "n", "n")',
        f'up * on() group_left(a) label_replace(vector(1), "a", "{LONG}", "", "")',
        'sort_by_label(label_replace(up, "a", "' + "1x" * 2000 + '", "n", ".*"), "a")',
    ],
)
async def test_bytes_of_labels_that_a_query_makes_are_charged(query: str) -> None:
    async with await filled(100, 1, engine=EngineConfig(samples_max=9000)) as database:
        assert (await database.query("up", START_MS + 1000)).samples_used < 4000
        with pytest.raises(TooManySamples, match="more than 9,000, where 110 bytes of labels count"):
            await database.query(query, START_MS + 1000)


def test_labels_that_series_share_are_charged_for_each_series_of_the_answer() -> None:
    # Every branch of `or` has a copy of each label set. In memory they share the long value.
    source = load({f'up{{n="{n}",long="{LONG}"}}': "1" for n in range(10)})
    query = " or ".join(f'label_replace(up, "b", "{n}", "n", ".*")' for n in range(4))
    prepared = Engine(EngineConfig(samples_max=1_000_000)).instant(query, 0)
    result = prepared.evaluate(source)
    assert len(result.series) == 40
    assert result.samples_used > 40 * 100 * 2  # charged when they are created and again in the result


def test_listed_labels_cost_what_their_values_take() -> None:
    short, long = Labels.of({"a": "1"}), Labels.of({"a": LONG})
    assert labels_cost(short, 10) == 10
    assert 100 <= labels_cost(long, 10) <= 102


async def test_values_of_labels_are_charged_by_their_bytes_when_they_are_listed() -> None:
    database = await opened(disk().open(), engine=EngineConfig(samples_max=500))
    async with database:
        await database.write([series("up", (0, 1.0), long=f"{n}{LONG}") for n in range(6)])
        await database.sync()
        with pytest.raises(TooManySamples):
            await database.label_values("long")
        with pytest.raises(TooManySamples):
            await database.series()
        assert await database.label_values("__name__") == {"up"}


@pytest.mark.parametrize(
    "query",
    [
        'label_replace(up, "a", "$1", "n", "(.*)")',
        'label_join(up, "a", "-", "n", "n")',
        'count_values("a", up)',
        "sum by (n) (up)",
        'sort_by_label(up, "n")',
        'up * on(n) group_left() label_replace(up, "__name__", "", "n", ".*")',
    ],
)
def test_the_timeout_ends_what_makes_labels(query: str) -> None:
    source = load({f'up{{n="{n}"}}': f"{n}" for n in range(2000)})
    clock = TickingClock()
    config = EngineConfig(timeout="1000s")
    few = Engine(config, clock=clock).instant('sum(up{n="1"})', 0).evaluate(source)
    assert few.series
    before = clock.looks
    Engine(EngineConfig(timeout="100000s"), clock=clock).instant(query, 0).evaluate(source)
    looks = clock.looks - before
    timed = Engine(EngineConfig(timeout=f"{looks - 3}s"), clock=clock).instant(query, 0)
    with pytest.raises(QueryTimeout):
        timed.evaluate(source)
    assert looks >= 10


def test_labels_with_thousands_of_digits_are_sorted_as_numbers() -> None:
    numbers = ["9" * 5000, "1" + "0" * 5000, "2", "002", "10"]
    source = load({f'up{{n="{n}"}}': "1" for n in numbers})
    result = Engine().instant('sort_by_label(up, "n")', 0).evaluate(source)
    assert [one.labels.value("n") for one in result.series] == ["002", "2", "10", numbers[0], numbers[1]]


def test_the_timeout_ends_the_matching_of_an_expression() -> None:
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise QueryTimeout("over")

    candidates = [Labels.of({"n": f"{n}{LONG}"}) for n in range(20)]
    with pytest.raises(QueryTimeout):
        select_labels([Matcher(MatchOp.REGEX, "n", "(x|xx|xxx){50}.*")], candidates, check)
