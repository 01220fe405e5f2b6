"""Clients that do not read delay only themselves, and lose nothing that the log still has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest
from tests.contract.event_stream import Watcher
from tests.contract.raw_http import connect, request_bytes
from tests.contract.socket_client import opened
from tests.contract.topics_server import PROTOCOLS, Api, Server, fresh_name

BIG = "x" * 20_000


def read_events(raw: socket.socket, head: int, deadline_s: float = 30) -> list[int]:
    """Return the sequences up to record `head` of a chunked stream."""
    raw.settimeout(deadline_s)
    text = b""
    while b'"to_seq":%d,' % head not in text or not text.endswith(b"\r\n"):
        piece = raw.recv(1 << 20)
        assert piece, "the stream ended"
        text += piece
    body = unchunked(text.partition(b"\r\n\r\n")[2])
    frames = [frame for frame in body.split(b"\n\n") if b"event: record" in frame]
    data = [json.loads(frame.rpartition(b"data: ")[2]) for frame in frames]
    return [record["$seq"] for one in data for record in one["records"]]


def unchunked(text: bytes) -> bytes:
    parts, at = [], 0
    while at < len(text):
        end = text.find(b"\r\n", at)
        size = int(text[at:end], 16)
        parts.append(text[end + 2 : end + 2 + size])
        at = end + size + 4
    return b"".join(parts)


async def test_a_watcher_that_pauses_gets_everything_when_it_resumes(server: Server) -> None:
    watcher, topic = Watcher(server, "h1"), fresh_name()
    await watcher.write(topic, 0)
    created = await watcher.create({topic: {}})
    with connect(server) as raw:
        raw.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        raw.send(request_bytes("GET", created["stream_url"]))
        async with watcher.watch({topic: {"tail": True}}) as quick:
            await quick.until_caught_up()
            for number in range(400):  # 8 MB that the first one does not read
                await watcher.write(topic, [number, BIG])
            seen: list[int] = []
            while not seen or seen[-1] < 401:
                event = await quick.next()
                seen += event.seqs if event.name == "record" else []
            assert seen == list(range(2, 402))
        seqs = await asyncio.to_thread(read_events, raw.peer, 401)
        assert seqs == list(range(1, 402))


async def test_a_slow_watcher_gets_a_gap_only_if_the_log_has_dropped_records(server: Server) -> None:
    watcher, topic = Watcher(server, "h1"), fresh_name()
    async with watcher.client() as client:
        await client.put(f"/v0/topics/{topic}", json={"cap_records": 50})
    created = await watcher.create({topic: {}})
    with connect(server) as raw:
        raw.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 * 1024)
        raw.send(request_bytes("GET", created["stream_url"]))
        for number in range(600):
            await watcher.write(topic, [number, BIG])
        raw.peer.settimeout(20)
        text = b""
        while b'"to_seq":600,' not in text:
            text += raw.peer.recv(1 << 20)
    assert b"event: tombstone" in text
    assert b'"reason":"cap"' in text


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_no_client_waits_for_one_that_does_not_read(server: Server, protocol: str) -> None:
    watcher, topic = Watcher(server, protocol), fresh_name()
    await watcher.write(topic, 0)
    stuck = [(await watcher.create({topic: {}}))["stream_url"] for _ in range(5)]
    sockets = []
    try:
        for url in stuck:
            peer = socket.create_connection(server.host_and_port, timeout=10)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.sendall(request_bytes("GET", url))
            sockets.append(peer)
        async with watcher.watch({topic: {"tail": True}}) as quick:
            await quick.until_caught_up()
            for number in range(100):
                await watcher.write(topic, [number, BIG])
            began = time.monotonic()
            await watcher.write(topic, "last")
            while (event := await quick.next()).name != "record" or event.seqs[-1] < 102:
                pass
            assert time.monotonic() - began < 3
    finally:
        for peer in sockets:
            peer.close()


async def test_a_socket_that_sends_without_reading_is_paused(server: Server, h1: Api) -> None:
    topic = fresh_name()
    h1.write(topic, *[BIG] * 50)
    async with opened(server) as healthy:
        with socket.create_connection(server.host_and_port, timeout=10) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            headers = {
                "Upgrade": "websocket",
                "Connection": "Upgrade",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            }
            peer.sendall(request_bytes("GET", "/v0/ws", headers=headers))
            text = json.dumps({"op": "subscribe", "topic": topic}).encode()
            frame = bytes((0x81, 0x80 | len(text), 0, 0, 0, 0)) + text
            peer.setblocking(False)
            sent = 0
            with contextlib.suppress(BlockingIOError):  # the server stops reading long before this ends
                while sent < 64 * 1024**2:
                    sent += peer.send(frame * 100)
                    await asyncio.sleep(0)
            assert 0 < sent < 32 * 1024**2
            assert (await healthy.ask(op="ping"))["op"] == "pong"
