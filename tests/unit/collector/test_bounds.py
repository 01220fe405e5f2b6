"""Memory and the event loop under hostile requests: large ones are processed one at a time and counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from tests.collector_doubles import MemoryStore

from penstock import otlp
from penstock.collector.batcher import RESOURCES_MAX, check_framing
from penstock.collector.consumers import ArrowConsumer, RawConsumer
from penstock.collector.limiter import ReceiverLimiter
from penstock.errors import LimitExceeded, Unavailable
from penstock.metrics import Registry
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry

LARGE = telemetry(Signal.TRACES, items=1000) * 4
SMALL = telemetry(Signal.TRACES, items=1)


class Watched:
    """A wrapper of a function that counts concurrent calls. All calls wait until `go`."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self.inside = self.most = 0
        self.threads: set[int] = set()
        self.go = threading.Event()

    def __call__(self, *arguments: object) -> object:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.threads.add(threading.get_ident())
        try:
            self.go.wait(5)
            return self._function(*arguments)
        finally:
            with self._lock:
                self.inside -= 1


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(otlp.decode)
    monkeypatch.setattr(otlp, "decode", watched)
    return watched


async def inside(watched: Watched) -> None:
    while not watched.inside:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def limiter(intake: ArrowConsumer | RawConsumer, bytes_max: int = 1 << 30) -> ReceiverLimiter:
    return ReceiverLimiter("in", intake, bytes_max=bytes_max, registry=Registry())


async def test_large_requests_are_decoded_one_at_a_time(decoding: Watched) -> None:
    store = MemoryStore()
    made = limiter(ArrowConsumer(store))
    under_way = [asyncio.create_task(made.take(LARGE, Signal.TRACES)) for _ in range(4)]
    await inside(decoding)
    await asyncio.sleep(0.05)
    decoding.go.set()
    await asyncio.gather(*under_way)
    assert decoding.most == 1
    assert len(store.stored) == 4


async def test_a_disconnected_client_frees_no_capacity_before_its_request_has_ended(
    decoding: Watched,
) -> None:
    store = MemoryStore()
    made = limiter(ArrowConsumer(store), bytes_max=len(LARGE) + 100)
    leaving = asyncio.create_task(made.take(LARGE, Signal.TRACES))
    await inside(decoding)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert made.bytes == len(LARGE)
    with pytest.raises(Unavailable):
        await made.take(LARGE, Signal.TRACES)
    decoding.go.set()
    while made.requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert made.bytes == 0


async def test_bodies_that_are_being_decompressed_count_as_in_progress(decoding: Watched) -> None:
    made = limiter(RawConsumer(MemoryStore()), bytes_max=1000)
    unpacking = Watched(lambda: b"x")
    under_way = asyncio.create_task(made.run_on_thread(900, unpacking))
    await inside(unpacking)
    with pytest.raises(Unavailable):
        await made.run_on_thread(200, unpacking)
    with pytest.raises(Unavailable):
        await made.take(bytes(200), Signal.TRACES)
    unpacking.go.set()
    assert await under_way == b"x"
    assert (made.requests, made.bytes) == (0, 0)


async def test_full_validation_of_a_large_request_does_not_block_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting = Watched(otlp.count_items)
    counting.go.set()
    monkeypatch.setattr(otlp, "count_items", counting)
    await limiter(RawConsumer(MemoryStore(), full=True)).take(LARGE, Signal.TRACES)
    assert threading.get_ident() not in counting.threads


def test_an_absurd_number_of_resources_is_refused_early() -> None:
    assert check_framing(b"\x0a\x00" * RESOURCES_MAX) == RESOURCES_MAX
    with pytest.raises(LimitExceeded, match="resources"):
        check_framing(b"\x0a\x00" * (RESOURCES_MAX + 1))
    with pytest.raises(LimitExceeded, match="resources"):
        check_framing(b"\x12\x00" * (RESOURCES_MAX + 1))
