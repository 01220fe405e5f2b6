"""Concurrent requests: stored as one batch, and each gets its own reply."""

from __future__ import annotations

import asyncio

import pytest

from penstock import otlp
from penstock.collector.batcher import Mixed, RequestBatcher
from penstock.collector.consumers import TAKEN, Reply
from penstock.errors import InvalidInput, Unavailable
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry


class Recorder:
    """Stores its input once `limiter` is open."""

    def __init__(self) -> None:
        self.limiter = asyncio.Event()
        self.items: list[int] = []
        self.error: Exception | None = None

    async def take(self, data: bytes, signal: Signal, *, alone: bool) -> Reply:
        decoded = otlp.decode(data, signal)
        if decoded.rejected and not alone:
            raise Mixed("some items")
        await self.limiter.wait()
        if self.error is not None:
            raise self.error
        self.items.append(decoded.items)
        return Reply(decoded.rejected, decoded.message) if decoded.rejected else TAKEN


def spans(items: int, seed: int = 0) -> bytes:
    return telemetry(Signal.TRACES, items=items, seed=seed)


async def gathered(recorder: Recorder, requests: list[bytes]) -> list[object]:
    """Send one request immediately, then all the others, which accumulate meanwhile."""
    gathering = RequestBatcher(recorder.take)
    first = asyncio.create_task(gathering.add(spans(1), Signal.TRACES))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(gathering.add(data, Signal.TRACES)) for data in requests]
    for _ in range(5):
        await asyncio.sleep(0)
    recorder.limiter.set()
    await first
    return list(await asyncio.gather(*tasks, return_exceptions=True))


async def test_requests_that_arrive_while_others_are_stored_become_one_batch() -> None:
    recorder = Recorder()
    assert await gathered(recorder, [spans(3), spans(4), spans(5)]) == [TAKEN, TAKEN, TAKEN]
    assert recorder.items == [1, 12]


async def test_only_the_malformed_one_of_a_group_is_refused() -> None:
    recorder = Recorder()
    bad = b"\x0a\x03\x0a\x7f\x00"  # a complete outer field whose inner field exceeds its end
    replies = await gathered(recorder, [spans(3), bad, spans(4)])
    assert replies[0] == replies[2] == TAKEN
    assert isinstance(replies[1], InvalidInput)
    assert sum(recorder.items) == 1 + 7


async def test_a_request_truncated_inside_a_field_does_not_consume_the_next_request() -> None:
    recorder = Recorder()
    whole = spans(3)
    replies = await gathered(recorder, [whole[:-1], spans(4)])
    assert isinstance(replies[0], InvalidInput)
    assert replies[1] == TAKEN
    assert sum(recorder.items) == 1 + 4


async def test_refused_items_are_reported_to_their_sender() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(spans(2))
    request.resource_spans[0].scope_spans[0].spans[0].trace_id = b"short"
    recorder = Recorder()
    replies = await gathered(recorder, [spans(3), request.SerializeToString()])
    assert replies[0] == TAKEN
    assert isinstance(replies[1], Reply)
    assert replies[1].rejected == 1
    assert sum(recorder.items) == 1 + 3 + 1


async def test_a_full_store_is_reported_to_all_of_a_group() -> None:
    recorder = Recorder()
    gathering = RequestBatcher(recorder.take)
    recorder.error = Unavailable("full")
    recorder.limiter.set()
    replies = await asyncio.gather(
        *(gathering.add(spans(n), Signal.TRACES) for n in (1, 2, 3, 4)), return_exceptions=True
    )
    assert all(isinstance(reply, Unavailable) for reply in replies)
    recorder.error = None
    assert await gathering.add(spans(1), Signal.TRACES) == TAKEN


async def test_a_client_that_leaves_does_not_disturb_the_others() -> None:
    recorder = Recorder()
    gathering = RequestBatcher(recorder.take)
    tasks = [asyncio.create_task(gathering.add(spans(1), Signal.TRACES)) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    recorder.limiter.set()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(reply, asyncio.CancelledError) for reply in replies] == [False, False, True, False]


@pytest.mark.parametrize("signal", list(Signal))
async def test_groups_stay_below_their_size(signal: Signal, monkeypatch: pytest.MonkeyPatch) -> None:
    data = telemetry(signal, items=2)
    monkeypatch.setattr("penstock.collector.batcher._GROUP_BYTES_MAX", 2 * len(data))
    recorder = Recorder()
    gathering = RequestBatcher(recorder.take)
    tasks = [asyncio.create_task(gathering.add(data, signal)) for _ in range(9)]
    await asyncio.sleep(0)
    recorder.limiter.set()
    assert set(await asyncio.gather(*tasks)) == {TAKEN}
    assert max(recorder.items) <= 4
    assert sum(recorder.items) == 18
