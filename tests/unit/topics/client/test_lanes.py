"""The client's connections: one per concurrent call, and none blocked by a lost call."""

from __future__ import annotations

import asyncio
import ssl

import httpx
import pytest

from penstock.topics.client.connection import Lanes

REQUEST = httpx.Request("GET", "http://127.0.0.1:1/", extensions={"timeout": {"pool": 1.0}})


class Lane(httpx.AsyncHTTPTransport):
    """A pool of one connection that never stops counting an interrupted call, as real pools have done."""

    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate
        self.closed = False
        self._held = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._held:
            raise httpx.PoolTimeout("held by a call that is gone")
        self._held = True
        await self._gate.wait()
        self._held = False
        return httpx.Response(200, content=b"")

    async def aclose(self) -> None:
        self.closed = True


class OwnLanes(Lanes):
    def __init__(self, count: int) -> None:
        super().__init__(trusted=ssl.create_default_context(), count=count)
        self.gate = asyncio.Event()
        self.made: list[Lane] = []

    def _add(self) -> httpx.AsyncHTTPTransport:
        self.made.append(Lane(self.gate))
        self._lanes.append(self.made[-1])
        return self.made[-1]


async def test_a_cancelled_call_closes_its_connection() -> None:
    lanes = OwnLanes(1)
    lost = asyncio.create_task(lanes.handle_async_request(REQUEST))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    lanes.gate.set()
    assert (await lanes.handle_async_request(REQUEST)).status_code == 200
    await lanes.aclose()
    assert [lane.closed for lane in lanes.made] == [True, True]


async def test_a_connection_is_reused_after_a_response() -> None:
    lanes = OwnLanes(2)
    lanes.gate.set()
    for _ in range(3):
        assert (await lanes.handle_async_request(REQUEST)).status_code == 200
    assert len(lanes.made) == 1
    await lanes.aclose()
