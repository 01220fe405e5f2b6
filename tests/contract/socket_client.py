"""A WebSocket client for the commands of `/v0/ws`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import websockets
from tests.contract.topics_server import Server
from websockets.asyncio.client import ClientConnection, connect

__all__ = ["Socket", "opened"]

SOON_S = 8.0


class Socket:
    """One open connection; `next` waits for a message, at most `SOON_S`."""

    def __init__(self, raw: ClientConnection) -> None:
        self.raw = raw

    async def send(self, **message: object) -> None:
        await self.raw.send(json.dumps(message))

    async def next(self) -> Any:
        async with asyncio.timeout(SOON_S):
            return json.loads(await self.raw.recv())

    async def ask(self, **message: object) -> Any:
        """Send, and return the next message that is not about records."""
        await self.send(**message)
        return await self.reply()

    async def reply(self) -> Any:
        while True:
            message = await self.next()
            if message["op"] in ("subscribed", "unsubscribed", "ack", "pong", "error"):
                return message

    async def subscribe(self, **fields: object) -> Any:
        answer = await self.ask(op="subscribe", **fields)
        assert answer["op"] == "subscribed", answer
        return answer

    async def publish(self, topic: str, *data: object, **fields: object) -> Any:
        answer = await self.ask(op="publish", topic=topic, records=[{"data": one} for one in data], **fields)
        assert answer["op"] == "ack", answer
        return answer

    async def refused(self, **message: object) -> Any:
        answer = await self.ask(**message)
        assert answer["op"] == "error", answer
        assert answer["message"]
        return answer

    async def is_closed(self) -> int | None:
        """Return the code with which the server closes."""
        async with asyncio.timeout(SOON_S):
            try:
                while True:
                    await self.raw.recv()
            except websockets.ConnectionClosed:
                return self.raw.close_code


@asynccontextmanager
async def opened(server: Server, key: str | None = None, **options: Any) -> AsyncIterator[Socket]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = f"ws://{server.address}/v0/ws"
    async with connect(
        url, additional_headers=headers, proxy=None, max_size=2**25, max_queue=None, **options
    ) as raw:
        yield Socket(raw)
