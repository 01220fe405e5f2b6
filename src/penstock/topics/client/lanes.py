"""A pool of connections whose cost per call does not grow with its size."""

from __future__ import annotations

import asyncio
import ssl

import httpx

__all__ = ["Lanes"]


class Lanes(httpx.AsyncBaseTransport):
    """Up to `count` keep-alive connections; a call takes the one that was used last.

    The usual pool looks at all its connections for every call, which at thirty calls at a time costs more
    than the call. Here each connection is a pool of its own, and answers are read before it is given back.
    One whose call failed or was given up is not used again: its pool may still count that call.
    """

    def __init__(self, *, trusted: ssl.SSLContext, count: int) -> None:
        self._trusted = trusted
        self._room = asyncio.Semaphore(count)
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._lanes: list[httpx.AsyncHTTPTransport] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._enter(request)
        try:
            lane = self._idle.pop() if self._idle else self._add()
            try:
                response = await lane.handle_async_request(request)
                try:
                    await response.aread()
                finally:
                    await response.aclose()
            except BaseException:
                self._give_up(lane)
                raise
            self._idle.append(lane)
        finally:
            self._room.release()
        return response

    async def aclose(self) -> None:
        for lane in self._lanes:
            await lane.aclose()
        while self._closing:
            await asyncio.wait(self._closing)

    def _give_up(self, lane: httpx.AsyncHTTPTransport) -> None:
        self._lanes.remove(lane)
        task = asyncio.get_running_loop().create_task(lane.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _enter(self, request: httpx.Request) -> None:
        timeouts = request.extensions.get("timeout", {})
        try:
            async with asyncio.timeout(timeouts.get("pool")):
                await self._room.acquire()
        except TimeoutError as error:
            raise httpx.PoolTimeout("all connections are busy", request=request) from error

    def _add(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        lane = httpx.AsyncHTTPTransport(verify=self._trusted, limits=limits)
        self._lanes.append(lane)
        return lane
