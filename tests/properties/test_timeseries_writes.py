"""Every write is refused, without effect on others, or is stored and can be read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.timeseries.database_doubles import HOUR_MS, START_MS, disk, opened

from penstock.coordinator import ApplyError
from penstock.errors import InvalidInput
from penstock.timeseries import Labels, Metadata, MetricType, Samples, Series, Temporality, TimeSeries
from penstock.timeseries.delta import check_series

pytestmark = pytest.mark.properties

SIZES = (1, 4_096, 8_191, 16_384, 16_385, 21_845, 21_846, 32_767, 32_768, 65_522, 65_535, 65_536, 70_000)
"""Text lengths around every limit, in characters of one, two and three bytes."""
long_texts = st.builds(
    lambda character, size: character * size, st.sampled_from("a\x00éᚠ"), st.sampled_from(SIZES)
)
texts = st.one_of(
    st.text(max_size=5),
    st.text(alphabet=st.characters(), max_size=3),
    st.text(alphabet="a\x00\x01\xff\ud800", max_size=3),
    long_texts,
)
pairs = st.lists(st.tuples(texts, texts), max_size=4)


def labels_of(found: list[tuple[str, str]]) -> Labels:
    try:
        return Labels.of(found)
    except InvalidInput:
        return Labels(found)


metadata = st.builds(
    Metadata,
    metric_type=st.one_of(st.sampled_from(MetricType), st.integers(-1, 300)),
    temporality=st.one_of(st.sampled_from(Temporality), st.integers(-1, 300)),
    monotonic=st.booleans(),
    unit=texts,
    description=texts,
)
plain_metadata = st.builds(Metadata, metric_type=st.sampled_from(MetricType), unit=st.text(max_size=3))
times = st.one_of(
    st.integers(START_MS, START_MS + 3 * HOUR_MS),
    st.sampled_from([0, 2**32 * 60_000 - 1, 2**32 * 60_000, -1]),
)
samples = st.lists(st.tuples(times, st.floats(width=64)), max_size=3).map(Samples.of)
one_series = st.builds(
    lambda labels, metadata, samples: Series(labels=labels, metadata=metadata, samples=samples),
    st.one_of(pairs, st.just([("__name__", "m")])).map(labels_of),
    st.one_of(plain_metadata, metadata),
    samples,
)


@given(
    written=st.lists(one_series, max_size=3),
    families=st.dictionaries(texts, st.one_of(plain_metadata, metadata), max_size=2),
    sequence=st.one_of(st.none(), st.integers(-1, 2**64)),
    source=texts,
)
@settings(max_examples=300)
def test_a_write_that_is_accepted_is_flushed_and_read_again(
    written: list[Series], families: Mapping[str, Metadata], sequence: int | None, source: str
) -> None:
    asyncio.run(accepted_is_stored(written, families, sequence, source))


async def accepted_is_stored(
    written: list[Series], families: Mapping[str, Metadata], sequence: int | None, source: str
) -> None:
    there = disk()
    async with await opened(there.open()) as database:
        try:
            handle = await database.write(written, families=families, sequence=sequence, source=source)
            await handle.epoch()
        except (InvalidInput, ApplyError):
            pass
        await database.sync()
        before = await known(database)
    async with await opened(there.open()) as database:
        assert await known(database) == before


async def known(database: TimeSeries) -> tuple[object, ...]:
    return database.metadata(), await database.series(), await database.stored_position(), database.buckets


@given(written=st.lists(one_series, max_size=3))
@settings(max_examples=300)
def test_a_record_that_the_check_lets_through_is_accepted(written: list[Series]) -> None:
    try:
        check_series(written)
    except InvalidInput:
        return
    asyncio.run(accepted(written))


async def accepted(written: list[Series]) -> None:
    async with await opened(disk().open()) as database:
        handle = await database.write(written, sequence=1)
        await handle.epoch()
