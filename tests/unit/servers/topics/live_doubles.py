"""Watches over an in-memory engine, and connections that a test can fill and empty."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.topics.engine_doubles import World, settle

from penstock.http.app import Call
from penstock.http.auth import ANYONE, Keyring, Principal, Scope
from penstock.http.message import Request, Response
from penstock.servers.limits import StreamLimits
from penstock.servers.topics.routes import LiveApi
from penstock.topics import Engine


class FakeSink:
    """A connection that records writes and can be made unwritable."""

    def __init__(self) -> None:
        self.is_writable = True
        self.pieces: list[bytes] = []
        self.is_ended = False
        self.is_cut = False

    def write(self, data: bytes) -> None:
        assert not self.is_ended
        self.pieces.append(data)

    def end(self) -> None:
        self.is_ended = True

    def cut(self) -> None:
        self.is_cut = True

    def events(self) -> list[tuple[str, Any]]:
        """Return the named events so far."""
        found = []
        for block in b"".join(self.pieces).decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
            if "event" in fields:
                found.append((fields["event"], json.loads(fields["data"])))
        return found

    def names(self) -> list[str]:
        return [name for name, _ in self.events()]

    def seqs(self) -> list[int]:
        events = [data for name, data in self.events() if name == "record"]
        return [record["$seq"] for data in events for record in data["records"]]

    def beats(self) -> int:
        return b"".join(self.pieces).count(b": hb ")


class Watching:
    """The live part of a server without the server."""

    def __init__(self, world: World, limits: StreamLimits | None = None) -> None:
        self.world = world
        self.api = LiveApi(world.engine, world.clock, limits)
        self.keys = Keyring()
        self.watch = self.api._watch

    @property
    def engine(self) -> Engine:
        return self.world.engine

    async def create(self, *, principal: Principal | None = None, **body: object) -> str:
        headers = {b"content-type": b"application/json"}
        request = Request(b"POST", b"/v0/watch", headers, json.dumps(body).encode())
        call = Call(request, principal or self.watch.keys.principal(None), "")
        answer = json.loads(bytes((await self.watch.create(call)).body))  # type: ignore[arg-type]
        wid: str = answer["wid"]
        return wid

    async def respond(self, wid: str, last_event_id: bytes = b"") -> Response:
        headers = {b"last-event-id": last_event_id} if last_event_id else {}
        request = Request(b"GET", b"/v0/watch/" + wid.encode(), headers)
        return await self.watch.open(Call(request, Principal(scopes=Scope.NONE), wid))

    async def open(self, wid: str, last_event_id: bytes = b"") -> tuple[Any, FakeSink]:
        """Return the stream and its connection, after everything ready was sent."""
        live = (await self.respond(wid, last_event_id)).live
        assert live is not None
        writer = FakeSink()
        live.attach(writer)
        await settle()
        return live, writer

    async def follow(self, topic: str, **fields: object) -> tuple[Any, FakeSink]:
        return await self.open(await self.create(topics={topic: {}}, **fields))


__all__ = ["ANYONE", "FakeSink", "Watching"]
