"""A client of server-sent events over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from tests.contract.topics_server import Server

__all__ = ["Event", "EventStream", "Watcher", "read_id"]

SOON_S = 8.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Created once: each SSL context loads every certificate of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One frame: a named event, or a comment."""

    name: str
    data: Any = None
    id: str | None = None
    lines: tuple[str, ...] = ()

    @property
    def seqs(self) -> list[int]:
        return [record["$seq"] for record in self.data["records"]]


def read_id(ident: str | None) -> dict[str, int]:
    assert ident is not None
    assert "=" not in ident
    decoded: dict[str, int] = json.loads(base64.urlsafe_b64decode(ident + "=" * (-len(ident) % 4)))
    return decoded


def parse(block: str) -> Event:
    lines = tuple(block.split("\n"))
    if lines[0].startswith(":"):
        return Event(name="comment", data=lines[0], lines=lines)
    fields = dict(line.split(": ", 1) for line in lines)
    if "retry" in fields:
        return Event(name="retry", data=int(fields["retry"]), lines=lines)
    assert list(fields) in (["id", "event", "data"], ["event", "data"]), lines
    return Event(name=fields["event"], data=json.loads(fields["data"]), id=fields.get("id"), lines=lines)


class EventStream:
    """An open stream; `next` waits for a frame, at most `SOON_S`."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._text = response.aiter_text()
        self._pending = ""

    async def next(self, *, heartbeats: bool = False) -> Event:
        while True:
            while "\n\n" not in self._pending:
                async with asyncio.timeout(SOON_S):
                    self._pending += await anext(self._text)
            block, _, self._pending = self._pending.partition("\n\n")
            event = parse(block)
            if event.name != "retry" and (heartbeats or event.name != "comment"):
                return event

    async def take(self, count: int) -> list[Event]:
        return [await self.next() for _ in range(count)]

    async def until_caught_up(self) -> list[Event]:
        events = [await self.next()]
        while events[-1].name != "caught-up":
            events.append(await self.next())
        return events

    async def ended(self) -> bool:
        """Return whether the server ends the stream without another event."""
        with contextlib.suppress(StopAsyncIteration):
            async with asyncio.timeout(SOON_S):
                while True:
                    self._pending += await anext(self._text)
        return not self._pending.strip()


class Watcher:
    """Creates watches and opens them, each stream on its own connection."""

    def __init__(self, server: Server, protocol: str, key: str | None = None) -> None:
        self.server = server
        self._options: dict[str, Any] = {
            "base_url": server.url,
            "http1": protocol != "h2",
            "http2": protocol == "h2",
            "timeout": 40,
            "trust_env": False,
            "verify": _NO_TLS,
            "headers": {} if key is None else {"Authorization": f"Bearer {key}"},
        }

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(**self._options)

    async def post(self, path: str, body: object) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body)

    async def write(self, topic: str, *data: object, **fields: object) -> dict[str, Any]:
        body = {"records": [{"data": one} for one in data], **fields}
        answer: dict[str, Any] = (await self.post(f"/v0/topics/{topic}", body)).json()
        assert "error" not in answer, answer
        return answer

    async def create(
        self, topics: Mapping[str, object], *, query: str = "", **fields: object
    ) -> dict[str, Any]:
        response = await self.post(f"/v0/watch{query}", {"topics": topics, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @asynccontextmanager
    async def open(self, wid: str, **headers: str) -> AsyncIterator[EventStream]:
        async with (
            self.client() as client,
            client.stream("GET", f"/v0/watch/{wid}", headers=headers) as response,
        ):
            assert response.status_code == 200, await response.aread()
            yield EventStream(response)

    @asynccontextmanager
    async def watch(self, topics: Mapping[str, object], **fields: object) -> AsyncIterator[EventStream]:
        created = await self.create(topics, **fields)
        async with self.open(created["wid"]) as stream:
            yield stream
