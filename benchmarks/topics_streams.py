"""Delivery of records to live clients: latency and records per second."""

from __future__ import annotations

import json
import resource
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rounds import Plan, scratch
from table import Row
from topics_load import Connection, HttpAnswer, dial
from topics_server import RECORD_BYTES, Server, bodies, opened, texts, write_requests

__all__ = ["begun", "socket_fanout", "watch_latency"]

_BUFFER_BYTES = 1024 * 1024
_PATIENCE_S = 30.0
_MARK = b'"$seq":'
_OVERLAP = len(_MARK) - 1
"""Bytes kept from the last read of a socket, because a mark may have been split."""
_LATENCY_BARS_MS = {100: 5.0, 1000: 25.0}
_FANOUT_BAR = 100_000
_PARTICIPANTS = 300
_WATCH = (
    f"one writer over HTTP, one record of {RECORD_BYTES} B at a time to a `disk` topic; from the moment the "
    "write is sent until each watcher has read the event, over all watchers and all writes; `last` is until "
    "every watcher has it"
)
_FANOUT = (
    f"{_PARTICIPANTS} WebSockets on one `disk` topic, records of {RECORD_BYTES} B, 4 writers over HTTP; one "
    "delivery is one record at one participant, and all of them are counted"
)


def watch_latency(plan: Plan) -> list[Row]:
    """Measure the time from a write to its delivery to all of 1 to 1,000 watchers."""
    _allow_files(4096)
    rows: list[Row] = []
    with scratch(plan) as root, Server(root / "watch") as server:
        for count in (1, 10, 100, 1000):
            rows += _watched(plan, server, count)
    return rows


def _watched(plan: Plan, server: Server, count: int) -> list[Row]:
    topic = f"watched-{count}"
    requests = write_requests(topic, bodies(texts(64), 1))
    server.ask("PUT", f"/v0/topics/{topic}", {})
    with _sockets(_watcher(server, topic) for _ in range(count)) as watchers:
        writer = Connection(server.port, requests, HttpAnswer())
        with opened([writer]):
            _deliver(writer, watchers, 20)
            before = server.cpu_s()
            writes = plan.pick(500, 150)
            waits, lasts = _deliver(writer, watchers, writes)
            spent = (server.cpu_s() - before) / writes
    bar_ms = _LATENCY_BARS_MS.get(count)
    section = "1 watch"
    return [
        Row(
            section=section, what=f"{count} watchers, p50", ours=_share_ms(waits, 0.5), unit="ms", note=_WATCH
        ),
        Row(
            section=section,
            what=f"{count} watchers, p99",
            ours=_share_ms(waits, 0.99),
            unit="ms",
            ceiling=bar_ms,
            against="" if bar_ms is None else "the bar",
            bar=None if bar_ms is None else 1.0,
            at_most=True,
            note=_WATCH,
        ),
        Row(
            section=section,
            what=f"{count} watchers, last, p50",
            ours=_share_ms(lasts, 0.5),
            unit="ms",
            note=_WATCH,
        ),
        Row(
            section=section,
            what=f"{count} watchers, CPU per delivery",
            ours=spent / count * 1e6,
            unit="us",
            note=_WATCH,
        ),
    ]


def _watcher(server: Server, topic: str) -> socket.socket:
    session = server.ask("POST", "/v0/watch", {"topics": {topic: {"tail": True}}})
    return begun(server, f"GET {session['stream_url']} HTTP/1.1\r\nhost: x\r\n\r\n".encode(), b"caught-up")


def begun(server: Server, request: bytes, sign: bytes) -> socket.socket:
    """Send the request, and return the connection once it has received `sign`."""
    connection = dial(server.port)
    connection.sendall(request)
    heard = b""
    while sign not in heard:
        heard += (piece := connection.recv(65536))
        if not piece:
            raise RuntimeError(f"the server hung up: {heard!r}")
    return connection


def _deliver(
    writer: Connection, watchers: Sequence[socket.socket], writes: int
) -> tuple[list[float], list[float]]:
    """Write repeatedly, each time after all watchers have the previous record. Return the delivery times."""
    buffer = bytearray(_BUFFER_BYTES)
    waits: list[float] = []
    lasts: list[float] = []
    by_number = {watcher.fileno(): watcher for watcher in watchers}
    answer = writer.socket.fileno()
    with select.epoll() as poll:
        for number in (*by_number, answer):
            poll.register(number, select.EPOLLIN)
        for _ in range(writes):
            missing = len(watchers) + 1
            writer.send()
            while missing:
                ready = poll.poll(_PATIENCE_S)
                if not ready:
                    raise TimeoutError(f"{missing} deliveries did not come")
                for number, _ in ready:
                    if number == answer:
                        missing -= writer.receive(buffer)
                        continue
                    size = by_number[number].recv_into(buffer)
                    if buffer.find(b"event: record", 0, size) >= 0:
                        waits.append(time.perf_counter() - writer.sent_s)
                        missing -= 1
            lasts.append(max(waits[-len(watchers) :]))
    return waits, lasts


def socket_fanout(plan: Plan) -> list[Row]:
    """Measure the deliveries to many WebSocket clients while writers write as fast as possible."""
    _allow_files(4096)
    rows: list[Row] = []
    with scratch(plan) as root, Server(root / "fanout") as server:
        for batch in (1, 10, 100):
            rows += _fanned_out(plan, server, batch)
    return rows


def _fanned_out(plan: Plan, server: Server, batch: int) -> list[Row]:
    topic = f"chat-{batch}"
    server.ask("PUT", f"/v0/topics/{topic}", {})
    requests = write_requests(topic, bodies(texts(max(64, 4 * batch)), batch))
    with _sockets(_participant(server, topic) for _ in range(_PARTICIPANTS)) as participants:
        writers = [Connection(server.port, requests[place:], HttpAnswer()) for place in range(4)]
        with opened(writers):
            before = server.cpu_s()
            seconds, delivered = _chat(writers, participants, batch, float(plan.pick(8, 4)))
            spent = server.cpu_s() - before
    is_judged = batch == 10
    section = "2 fan-out"
    return [
        Row(
            section=section,
            what=f"writes of {batch}, deliveries",
            ours=delivered / seconds,
            unit="records/s",
            ceiling=_FANOUT_BAR if is_judged else None,
            against="the bar" if is_judged else "",
            bar=1.0 if is_judged else None,
            note=_FANOUT,
        ),
        Row(
            section=section,
            what=f"writes of {batch}, CPU per delivery",
            ours=spent / delivered * 1e6,
            unit="us",
            note=_FANOUT,
        ),
    ]


def _participant(server: Server, topic: str) -> socket.socket:
    connection = begun(
        server,
        b"GET /v0/ws HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n",
        b"\r\n\r\n",
    )
    text = json.dumps({"op": "subscribe", "topic": topic, "tail": True}).encode()
    connection.sendall(bytes((0x81, 0x80 | len(text), 0, 0, 0, 0)) + text)
    heard = b""
    while b"caught_up" not in heard:
        heard += connection.recv(65536)
    return connection


def _chat(
    writers: Sequence[Connection], participants: Sequence[socket.socket], batch: int, seconds: float
) -> tuple[float, int]:
    """Write for the given time, then read until all clients have all records. Return the time and the
    deliveries."""
    buffer = bytearray(_BUFFER_BYTES)
    by_number = {writer.socket.fileno(): writer for writer in writers}
    readers = {participant.fileno(): participant for participant in participants}
    view = memoryview(buffer)[_OVERLAP:]
    tails = dict.fromkeys(readers, bytes(_OVERLAP))
    began = time.perf_counter()
    written = delivered = 0
    busy = len(writers)
    with select.epoll() as poll:
        for number in (*by_number, *readers):
            poll.register(number, select.EPOLLIN)
        for writer in writers:
            writer.send()
        while busy or delivered < written * len(participants):
            ready = poll.poll(_PATIENCE_S)
            if not ready:
                raise TimeoutError(f"{written * len(participants) - delivered} deliveries did not come")
            for number, _ in ready:
                if (reader := readers.get(number)) is not None:
                    buffer[:_OVERLAP] = tails[number]
                    size = reader.recv_into(view)
                    delivered += buffer.count(_MARK, 0, _OVERLAP + size)
                    tails[number] = bytes(buffer[size : size + _OVERLAP])
                elif by_number[number].receive(buffer):
                    written += batch
                    if time.perf_counter() - began < seconds:
                        by_number[number].send()
                    else:
                        busy -= 1
    return time.perf_counter() - began, delivered


def _share_ms(waits_s: Sequence[float], share: float) -> float:
    """Return the percentile of the waits in milliseconds."""
    ordered = sorted(waits_s)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000


@contextmanager
def _sockets(made: Iterator[socket.socket]) -> Iterator[list[socket.socket]]:
    """Open connections that are closed afterwards, even if some could not be opened."""
    found: list[socket.socket] = []
    try:
        found.extend(made)
        yield found
    finally:
        for one in found:
            one.close()


def _allow_files(count: int) -> None:
    """Raise the limit of open files to the number of connections, if the machine allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
