"""What type checkers know of the blocking classes. mypy reads this module; nothing runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, assert_type

from penstock.buffer.sync import Producer
from penstock.buffer.sync import WriteHandle as BufferWriteHandle
from penstock.coordinator import Delta
from penstock.coordinator.sync import Channel, Subscription, WriteCoordinator, WriteHandle
from penstock.timeseries.promql import QueryResult
from penstock.timeseries.sync import TimeSeries
from penstock.topics import Page, WriteResult
from penstock.topics.client.sync import Client
from penstock.vector.sync import VectorStore

IntDelta = Delta[int, str]


def results_are_those_of_the_async_methods(client: Client, database: TimeSeries) -> None:
    assert_type(client.write("clicks", [{"user": 1}], idempotency_key="a"), WriteResult)
    assert_type(client.follow("clicks", 7, limit=10), Iterator[Page])
    assert_type(database.query("sum(up)", 1, timeout_s=2.0), QueryResult)
    close: Callable[[], None] = database.close
    close()


def handles_block_as_well(producer: Producer, database: TimeSeries) -> None:
    assert_type(producer.produce([b"a"]), BufferWriteHandle)
    assert_type(database.write([]), WriteHandle)


def type_parameters_stay(words: WriteCoordinator[int, IntDelta, str]) -> None:
    assert_type(words.write(1, timeout=2.0), WriteHandle)
    assert_type(words.channel("side", capacity=1), Channel[int])
    assert_type(words.subscribe(freezes=True), Subscription[IntDelta, str])


def a_wrong_argument_is_an_error(client: Client, words: WriteCoordinator[int, IntDelta, str]) -> None:
    client.write("clicks", [], tagg="a")  # type: ignore[call-arg]
    client.write("clicks", 1)  # type: ignore[arg-type]
    client.write()  # type: ignore[call-arg]
    words.write("not a number")  # type: ignore[arg-type]
    TimeSeries.open()  # type: ignore[call-arg]


def opening_returns_the_class(config: Any) -> None:
    with TimeSeries.open("file:///var/metrics") as database:
        assert_type(database, TimeSeries)
    with VectorStore.open(config) as store:
        assert_type(store, VectorStore)
