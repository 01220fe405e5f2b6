"""Methods that `blocking` and its relatives make from async ones."""

from __future__ import annotations

import inspect
import threading
from collections.abc import AsyncGenerator

import pytest

from penstock.blocking import (
    BlockingContext,
    LoopThread,
    blocking,
    blocking_call,
    blocking_iterator,
    blocking_open,
    loop_thread,
)
from penstock.errors import Rejected


class Counter:
    """An async class that notes on which thread it was used."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.closed = 0

    @classmethod
    async def open(cls, start: int = 0) -> Counter:
        """Open a counter."""
        return cls()

    async def add(self, number: int, *, twice: bool = False) -> int:
        """Add a number."""
        self.threads.add(threading.get_ident())
        if number < 0:
            raise Rejected("a negative number")
        return number * (2 if twice else 1)

    def reset(self) -> int:
        """Reset the counter."""
        self.threads.add(threading.get_ident())
        return 0

    async def count(self, upto: int) -> AsyncGenerator[int, None]:
        """Count upwards."""
        try:
            for number in range(upto):
                yield number
        finally:
            self.closed += 1

    async def __aexit__(self, *error: object) -> None:
        self.closed += 1


def as_text(number: int, loop: LoopThread) -> str:
    assert loop is loop_thread()
    return str(number)


class Blocking(BlockingContext[Counter]):
    open = blocking_open(Counter.open)
    add = blocking(Counter.add)
    add_text = blocking(Counter.add, as_text)
    reset = blocking_call(Counter.reset)
    reset_text = blocking_call(Counter.reset, as_text)
    count = blocking_iterator(Counter.count)


@pytest.fixture
def inner() -> Counter:
    return Counter()


@pytest.fixture
def counter(inner: Counter) -> Blocking:
    return Blocking(inner, loop_thread())


def test_calls_run_on_the_loop_thread_and_return_the_result(counter: Blocking, inner: Counter) -> None:
    assert (counter.add(2), counter.add(2, twice=True), counter.reset()) == (2, 4, 0)
    assert len(inner.threads) == 1
    assert threading.get_ident() not in inner.threads


def test_errors_of_the_coroutine_reach_the_caller(counter: Blocking) -> None:
    with pytest.raises(Rejected, match="negative"):
        counter.add(-1)


def test_results_can_be_wrapped(counter: Blocking) -> None:
    assert (counter.add_text(3), counter.reset_text()) == ("3", "0")


def test_an_iterator_that_is_left_early_closes_the_async_generator(counter: Blocking, inner: Counter) -> None:
    numbers = counter.count(3)
    assert next(numbers) == 0
    numbers.close()  # type: ignore[attr-defined]
    assert inner.closed == 1
    assert list(counter.count(3)) == [0, 1, 2]
    assert inner.closed == 2


def test_open_returns_an_instance_and_the_with_block_closes_it() -> None:
    with Blocking.open(1) as counter:
        assert isinstance(counter, Blocking)
    assert counter._inner.closed == 1


@pytest.mark.parametrize("name", ["open", "add", "reset", "count"])
def test_name_docstring_and_parameters_are_those_of_the_async_method(name: str) -> None:
    made, original = getattr(Blocking, name), getattr(Counter, name)
    assert (made.__name__, made.__doc__) == (original.__name__, original.__doc__)
    assert inspect.signature(made).parameters == inspect.signature(original).parameters
    assert not inspect.iscoroutinefunction(made)


def test_a_call_from_the_loop_thread_is_refused(counter: Blocking) -> None:
    async def mistake() -> int:
        return counter.add(1)

    with pytest.raises(Rejected, match="use the async class"):
        loop_thread().run(mistake())
