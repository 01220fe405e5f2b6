"""Jobs through a queue, copies through routers, and one urgent topic among many busy ones."""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rounds import Plan, scratch
from table import Row
from topics_load import Connection, HttpAnswer, dial
from topics_server import RECORD_BYTES, Server, bodies, opened, texts, write_requests
from topics_streams import begun

__all__ = ["queue_jobs", "router_fanout", "urgent_topic"]

_WORKERS = 50
_JOBS_BAR = 10_000
_CLAIM_MAX = 20
_BUFFER_BYTES = 1024 * 1024
_PATIENCE_S = 60.0
_JOB = re.compile(rb'"lease_id":"(lease_[0-9a-f]+)","deadline":\d+,"deliveries":\d+,"\$seq":(\d+)')
_ROUTERS = 100
_ROUTED_WRITES_S = 0.05
_BUSY_TOPICS = 100
_URGENT_WRITES_S = 0.02

_QUEUE = (
    f"{_WORKERS} workers on one `disk` queue, each claims up to {_CLAIM_MAX} jobs of {RECORD_BYTES} B and "
    "acks them, over a connection of its own; a job counts once, when its ack is answered. "
    "spread: jobs of the busiest worker against those of the idlest"
)
_ROUTED = (
    f"one writer, 10 records every {_ROUTED_WRITES_S * 1000:.0f} ms to a `disk` topic; in turns without "
    f"routers and with {_ROUTERS} of them, which copy every record to a topic each. copies: all records that "
    "the routers make of one load, from its last acknowledgement on"
)
_URGENT = (
    f"a topic of priority 1000 with one watcher and a write every {_URGENT_WRITES_S * 1000:.0f} ms, beside "
    f"{_BUSY_TOPICS} topics of priority 0 with a watcher each, written to by 8 connections as fast as they "
    "are answered; from the moment the write is sent until the watcher has the event"
)


class _Worker:
    """Worker that claims and acks in a loop."""

    def __init__(self, server: Server, queue: str, number: int) -> None:
        self.socket = dial(server.port)
        self.done = 0
        self._path = f"/v0/topics/{queue}"
        self._node = f"worker-{number}"
        self._held = 0
        self._heard = b""

    def claim(self) -> None:
        self._held = 0
        self._send("claim", b'{"node":"%b","max":%d}' % (self._node.encode(), _CLAIM_MAX))

    def receive(self, buffer: bytearray) -> bool:
        """Process the received bytes and send the next requests. Return False if the queue was empty."""
        size = self.socket.recv_into(buffer)
        self._heard += bytes(buffer[:size])
        head = self._heard.find(b"\r\n\r\n")
        if head < 0:
            return True
        at = self._heard.find(b"content-length: ", 0, head) + 16
        if len(self._heard) < head + 4 + int(self._heard[at : self._heard.find(b"\r", at)]):
            return True
        answer, self._heard = self._heard, b""
        if answer[9:10] != b"2":
            raise RuntimeError(f"the server answered {answer[:400]!r}")
        if self._held:
            self.done += self._held
            self.claim()
            return True
        jobs = _JOB.findall(answer)
        if not jobs:
            return False
        self._held = len(jobs)
        seqs = b",".join(seq for _, seq in jobs)
        leases = b",".join(b'"%b"' % lease for lease, _ in jobs)
        self._send("ack", b'{"node":"%b","seqs":[%b],"lease_ids":[%b]}' % (self._node.encode(), seqs, leases))
        return True

    def _send(self, verb: str, body: bytes) -> None:
        head = (
            f"POST {self._path}/{verb} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)


def queue_jobs(plan: Plan) -> list[Row]:
    """Measure many workers that claim and finish all jobs of a queue."""
    count = plan.pick(200_000, 60_000)
    with scratch(plan) as root, Server(root / "jobs") as server:
        server.ask("PUT", "/v0/topics/jobs", {"type": "queue", "lease_ms": 60_000})
        server.fill("jobs", count, texts(4000))
        total = server.ask("GET", "/v0/topics/jobs")["queue"]["ready"]
        workers = [_Worker(server, "jobs", number) for number in range(_WORKERS)]
        before = server.cpu_s()
        seconds = _work(workers)
        spent = server.cpu_s() - before
        left = server.ask("GET", "/v0/topics/jobs")["queue"]
    done = [worker.done for worker in workers]
    assert sum(done) == total, f"{sum(done)} jobs were done, of {total}"
    assert left["ready"] == left["in_flight"] == 0, left
    return [
        Row(
            section="3 queue",
            what=f"{_WORKERS} workers",
            ours=total / seconds,
            unit="jobs/s",
            ceiling=_JOBS_BAR,
            against="the bar",
            bar=1.0,
            note=_QUEUE,
        ),
        Row(
            section="3 queue",
            what="spread between workers",
            ours=max(done) / max(min(done), 1),
            unit="",
            note=_QUEUE,
        ),
        Row(section="3 queue", what="CPU per job", ours=spent / total * 1e6, unit="us", note=_QUEUE),
    ]


def _work(workers: list[_Worker]) -> float:
    buffer = bytearray(_BUFFER_BYTES)
    by_number = {worker.socket.fileno(): worker for worker in workers}
    began = time.perf_counter()
    with select.epoll() as poll:
        for number, worker in by_number.items():
            poll.register(number, select.EPOLLIN)
            worker.claim()
        left = len(workers)
        while left:
            ready = poll.poll(_PATIENCE_S)
            if not ready:
                raise TimeoutError("the workers wait for an answer")
            for number, _ in ready:
                if not by_number[number].receive(buffer):
                    poll.unregister(number)
                    left -= 1
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.socket.close()
    return seconds


def router_fanout(plan: Plan) -> list[Row]:
    """Measure the cost of 100 routers for writers to their source, and the rate of copies."""
    waits: dict[str, list[float]] = {"plain": [], "routed": []}
    with scratch(plan) as root, Server(root / "routers") as server:
        for number in range(_ROUTERS):
            server.ask("PUT", f"/v0/routers/r{number}", {"source": "routed", "dest": f"copy-{number}"})
        server.ask("PUT", "/v0/topics/plain", {})
        for _ in range(plan.pick(6, 3)):
            for name, taken in waits.items():
                taken += _acks(server, name, float(plan.pick(3, 2)))
            _wait_for_copies(server)
        server.fill("routed", plan.pick(20_000, 5_000), texts(4000), batch=500)
        began = _copied(server)
        seconds = _wait_for_copies(server)
        made = _copied(server) - began
        heads = {server.ask("GET", f"/v0/topics/copy-{n}")["head_seq"] for n in range(_ROUTERS)}
    assert len(heads) == 1, f"the copies differ: {sorted(heads)}"
    rows = [
        Row(
            section="4 routers",
            what=f"ack of a write, {label}, {_ROUTERS} routers on the topic",
            ours=_at(waits["routed"], share),
            unit="ms",
            ceiling=_at(waits["plain"], share),
            against="the same without routers",
            note=_ROUTED,
        )
        for label, share in (("p50", 0.5), ("p99", 0.99))
    ]
    rate = made / max(seconds, 0.001)
    return [*rows, Row(section="4 routers", what="copies", ours=rate, unit="records/s", note=_ROUTED)]


def _acks(server: Server, topic: str, seconds: float) -> list[float]:
    """Return the response times of writes at a rate below the server's capacity."""
    writer = Connection(server.port, write_requests(topic, bodies(texts(640), 10)), HttpAnswer())
    buffer = bytearray(_BUFFER_BYTES)
    waits: list[float] = []
    next_s = began = time.perf_counter()
    with opened([writer]):
        while time.perf_counter() - began < seconds:
            time.sleep(max(0.0, next_s - time.perf_counter()))
            next_s += _ROUTED_WRITES_S
            writer.send()
            while not writer.receive(buffer):
                pass
            waits.append(time.perf_counter() - writer.sent_s)
    return waits


def _copied(server: Server) -> int:
    routers = server.ask("GET", "/v0/routers?page_size=1000")["routers"]
    return sum(router["forwarded_total"] for router in routers)


def _wait_for_copies(server: Server) -> float:
    """Wait until the copies are complete. Poll only the routers, because reading a copy would update it."""
    began = time.perf_counter()
    head = server.ask("GET", "/v0/topics/routed")["head_seq"]
    while True:
        routers = server.ask("GET", "/v0/routers?page_size=1000")["routers"]
        if all(router["forwarded_total"] >= head for router in routers):
            return time.perf_counter() - began
        time.sleep(0.01)


def urgent_topic(plan: Plan) -> list[Row]:
    """Measure the latency of an urgent record while the server is overloaded with deliveries."""
    with scratch(plan) as root, Server(root / "urgent") as server:
        server.ask("PUT", "/v0/topics/urgent", {"priority": 1000})
        names = [f"busy-{number}" for number in range(_BUSY_TOPICS)]
        for name in names:
            server.ask("PUT", f"/v0/topics/{name}", {"priority": 0})
        calm = _urgent_waits(server, [], float(plan.pick(6, 3)))
        pressed = _urgent_waits(server, names, float(plan.pick(12, 6)))
    return [
        Row(section="5 priority", what=f"{what}, {label}", ours=_at(waits, share), unit="ms", note=_URGENT)
        for what, waits in (("alone", calm), (f"beside {_BUSY_TOPICS} busy topics", pressed))
        for label, share in (("p50", 0.5), ("p99", 0.99))
    ]


def _at(waits_s: list[float], share: float) -> float:
    ordered = sorted(waits_s)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000


def _urgent_waits(server: Server, busy: list[str], seconds: float) -> list[float]:
    requests = [write_requests(name, bodies(texts(8), 1))[0] for name in busy]
    writers = [Connection(server.port, requests[place::8], HttpAnswer()) for place in range(8 if busy else 0)]
    urgent = Connection(server.port, write_requests("urgent", bodies(texts(8), 1)), HttpAnswer())
    with (
        _watchers(server, busy) as others,
        _watchers(server, ["urgent"]) as (watcher,),
        opened([*writers, urgent]),
    ):
        return _paced(urgent, watcher, writers, others, seconds)


@contextmanager
def _watchers(server: Server, names: list[str]) -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    try:
        for name in names:
            session = server.ask("POST", "/v0/watch", {"topics": {name: {"tail": True}}})
            request = f"GET {session['stream_url']} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
            sockets.append(begun(server, request, b"caught-up"))
        yield sockets
    finally:
        for one in sockets:
            one.close()


def _paced(
    urgent: Connection,
    watcher: socket.socket,
    writers: list[Connection],
    others: list[socket.socket],
    seconds: float,
) -> list[float]:
    buffer = bytearray(_BUFFER_BYTES)
    waits: list[float] = []
    by_number = {writer.socket.fileno(): writer for writer in writers}
    heard = {one.fileno(): one for one in others}
    answer, event = urgent.socket.fileno(), watcher.fileno()
    waiting: set[int] = set()
    next_s = began = time.perf_counter()
    with select.epoll() as poll:
        for number in (*by_number, *heard, answer, event):
            poll.register(number, select.EPOLLIN)
        for writer in writers:
            writer.send()
        while (now := time.perf_counter()) - began < seconds or waiting:
            if not waiting and now >= next_s:
                next_s = now + _URGENT_WRITES_S
                waiting = {answer, event}
                urgent.send()
            for number, _ in poll.poll(max(0.0, min(next_s - now, 0.02))):
                if number in heard:
                    heard[number].recv_into(buffer)
                elif number == event:
                    size = watcher.recv_into(buffer)
                    if buffer.find(b"event: record", 0, size) >= 0:
                        waits.append(time.perf_counter() - urgent.sent_s)
                        waiting.discard(event)
                elif number == answer:
                    if urgent.receive(buffer):
                        waiting.discard(answer)
                elif by_number[number].receive(buffer):
                    by_number[number].send()
    return waits
