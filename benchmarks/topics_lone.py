"""A single synced write: the time of the disk, and the overhead of the engine and of HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rounds import Plan, scratch
from table import Row
from topics_embedded import embedded_engine
from topics_floor import DiskFloor, bare_server
from topics_load import Connection, HttpAnswer, drive
from topics_server import RECORD_BYTES, Server, bodies, opened, texts, write_requests

__all__ = ["lone"]

_SECTION = "2 lone synced write"
_LOGGED_BYTES = RECORD_BYTES + 56 + 54
"""Bytes of one such record in the log: its frame, and the mark that confirms the previous commit."""
_PAUSE_S = 0.0002
_SERVER_TOTAL = b'"server_total_ms":'
_TOPIC = "lone"

_NOTE = (
    f"{_LOGGED_BYTES} bytes, as the log writes them for this record, to the next place of a file that was "
    "filled with zeros and synced before, one at a time. The disk alone: pwritev with RWF_DSYNC, after a "
    "pause of 0.2 ms as between two requests; without one it is quicker, as the processor has not rested. "
    "The engine: without HTTP, in one process with the disk alone, a write of each in turns, after the same "
    "pause. The bare server: the same write in the same kind of event loop, an answer that is ready, nothing "
    "else. Ratio: median over the turns of the quotients of medians"
)


def lone(plan: Plan) -> list[Row]:
    """Measure a single synced write, in one process and over HTTP, compared with the disk."""
    waits: dict[str, list[float]] = {}
    with scratch(plan) as root, ExitStack() as stack:
        disk = stack.enter_context(DiskFloor(root / "floor", _LOGGED_BYTES))
        engine = stack.enter_context(embedded_engine(root / "engine", _LOGGED_BYTES, pause_s=_PAUSE_S))
        bare = stack.enter_context(_bare(root))
        writer = stack.enter_context(_writer(root / "server"))
        for turn in range(plan.pick(12, 5) + 1):
            found = {"disk": disk.median_us(0.2), "bare": bare(0.25)}
            found["http"], found["inside"] = _lone_writes(writer, 0.25)
            found["engine"], found["rested"] = engine(0.4)
            if turn:
                for name, wait_us in found.items():
                    waits.setdefault(name, []).append(wait_us)
    return [
        _row(waits, "the disk alone, without a pause, p50", "disk"),
        _row(waits, "fsync, 1 record, engine, p50", "engine", "rested", "the disk alone", bar=1.5),
        _row(waits, "a bare server over HTTP, p50", "bare", "rested", "the disk alone"),
        _row(waits, "fsync, 1 record, over HTTP, p50", "http", "rested", "the disk alone", bar=1.5),
        _row(waits, "fsync, 1 record, over HTTP, p50", "http", "bare", "the bare server"),
        _row(waits, "fsync, 1 record, within the server, p50", "inside"),
    ]


def _row(
    waits: dict[str, list[float]],
    what: str,
    of: str,
    over: str | None = None,
    against: str = "",
    bar: float | None = None,
) -> Row:
    ours = statistics.median(waits[of])
    if over is None:
        return Row(section=_SECTION, what=what, ours=ours, unit="us", note=_NOTE)
    return Row(
        section=_SECTION,
        what=what,
        ours=ours,
        ceiling=statistics.median(waits[over]),
        ratio=statistics.median(mine / theirs for mine, theirs in zip(waits[of], waits[over], strict=True)),
        against=against,
        unit="us",
        bar=bar,
        at_most=True,
    )


@contextmanager
def _bare(root: Path) -> Iterator[Callable[[float], float]]:
    """Run a server that only writes and syncs the same number of bytes for each request."""
    requests = write_requests(_TOPIC, bodies(texts(64), 1))
    with bare_server(root / "bare", _LOGGED_BYTES) as port:
        connection = Connection(port, requests, HttpAnswer())
        with opened([connection]):
            yield lambda seconds: drive([connection], seconds).percentile_ms(0.5) * 1000


@contextmanager
def _writer(root: Path) -> Iterator[Connection]:
    with Server(root) as server:
        server.ask("PUT", f"/v0/topics/{_TOPIC}", {"durability": "fsync"})
        connection = Connection(server.port, write_requests(_TOPIC, bodies(texts(64), 1)), HttpAnswer())
        with opened([connection]):
            yield connection


def _lone_writes(connection: Connection, seconds: float) -> tuple[float, float]:
    """Return the median response time at the client and as reported by the server, in microseconds."""
    buffer = bytearray(64 * 1024)
    waits: list[float] = []
    inside: list[float] = []
    end_s = time.perf_counter() + seconds
    while not waits or time.perf_counter() < end_s:
        connection.send()
        while not connection.receive(buffer):
            pass
        waits.append(time.perf_counter() - connection.sent_s)
        at = buffer.find(_SERVER_TOTAL) + len(_SERVER_TOTAL)
        inside.append(float(buffer[at : buffer.find(b",", at)]))
    return statistics.median(waits) * 1e6, statistics.median(inside) * 1e3
