"""The cost of an idle topic: memory per record, and the recovery time."""

from __future__ import annotations

from pathlib import Path

from rounds import Plan, scratch
from table import Row
from topics_server import RECORD_BYTES, Server, texts

__all__ = ["memory", "recovery"]

_TOPIC = "kept"
_BAR_S = 5.0
_SMALL_BYTES = 10
_RECOVERY = (
    "from the start of the process until it is ready, Python and imports included; 'in the log': records so "
    "small that no checkpoint came, each frame is read and checked; after a stop there is nothing to replay"
)
_MEMORY = (
    f"records of {_SMALL_BYTES} B; growth of resident memory that is the process's own, per live record: in "
    "the log, after as many records in another topic; in segments, of a fresh process beside an empty one. "
    "Bytes of records stay in mapped files, which the kernel may drop"
)


def recovery(plan: Plan) -> list[Row]:
    """Measure starts after a kill and after a stop, with many records."""
    count = plan.pick(1_000_000, 200_000)
    rows: list[Row] = []
    with scratch(plan) as root:
        with Server(root / "empty") as server:
            rows.append(_start("no records", server.start_s, None))
        for what, size in ((f"{RECORD_BYTES} B each", RECORD_BYTES), ("small, in the log", _SMALL_BYTES)):
            rows += _restarts(root / str(size), count, what, size)
    return rows


def _restarts(root: Path, count: int, what: str, size: int) -> list[Row]:
    server = Server(root)
    try:
        server.ask("PUT", f"/v0/topics/{_TOPIC}", {"durability": "disk"})
        server.fill(_TOPIC, count, texts(4000, size))
        held = server.ask("GET", f"/v0/topics/{_TOPIC}")["count"]
        server.kill()
        rows = []
        for how in ("SIGKILL", "a stop"):
            server = Server(root)
            found = server.ask("GET", f"/v0/topics/{_TOPIC}")["count"]
            assert found == held, f"{found} of {held} records after {how}"
            rows.append(_start(f"{held:,} records, {what}, after {how}", server.start_s, _BAR_S))
            server.stop()
        return rows
    finally:
        server.stop()


def _start(what: str, seconds: float, bar_s: float | None) -> Row:
    return Row(
        section="7 recovery",
        what=what,
        ours=seconds,
        ceiling=bar_s,
        against="" if bar_s is None else "the bar",
        unit="s",
        bar=None if bar_s is None else 1.0,
        at_most=True,
        note=_RECOVERY,
    )


def memory(plan: Plan) -> list[Row]:
    """Measure the bytes of the process per live record."""
    count = plan.pick(400_000, 100_000)
    records = texts(4000, _SMALL_BYTES)
    with scratch(plan) as root:
        with Server(root / "empty") as server:
            empty, _ = server.memory_bytes()
        with Server(root / "full") as server:
            server.fill("before", count, records)
            before, _ = server.memory_bytes()
            server.fill(_TOPIC, count, records)
            in_log = (server.memory_bytes()[0] - before) / count
        with Server(root / "full") as server:
            held = sum(server.ask("GET", f"/v0/topics/{name}")["count"] for name in ("before", _TOPIC))
            in_segments = (server.memory_bytes()[0] - empty) / held
    return [
        Row(section="8 memory", what=what, ours=size, unit="B/record", note=_MEMORY)
        for what, size in (("in the log", in_log), ("in segments", in_segments))
    ]
