"""Reads of a topic's pages: recent, old, and in the cold tier."""

from __future__ import annotations

import statistics

from rounds import Plan, scratch
from table import Row
from topics_load import Connection, HttpAnswer, drive
from topics_server import RECORD_BYTES, Server, diff_request, opened, texts

__all__ = ["run"]

_TOPIC = "pages"
_READERS = 4
_SEGMENT_RECORDS = 10_000
_HOT_BAR = 500_000
_NOTE = (
    f"{_READERS} connections, one request at a time each, records of {RECORD_BYTES} B; near the head: in the "
    "log; far behind: in sealed segments in the data directory; cold: in sealed segments in another directory"
)


def run(plan: Plan) -> list[Row]:
    """Measure records per second by age and page size. The threshold applies to the hot tier and full
    pages."""
    segments, recent = plan.pick(40, 16), plan.pick(50_000, 20_000)
    settings = {
        "TOPICS_SEGMENT_MAX_EVENTS": str(_SEGMENT_RECORDS),
        "TOPICS_HOT_RETAIN_SEGMENTS": str(segments // 2),
    }
    records = texts(4000)
    with scratch(plan) as root:
        settings["TOPICS_COLD_DIR"] = str(root / "cold")
        with Server(root / "hot", **settings) as server:
            server.fill(_TOPIC, segments * _SEGMENT_RECORDS, records)
        # A stop moves everything into segments, and the older ones into the cold tier.
        with Server(root / "hot", **settings) as server:
            head = server.ask("GET", f"/v0/topics/{_TOPIC}")["head_seq"]
            server.fill(_TOPIC, recent, records)
            half = segments // 2 * _SEGMENT_RECORDS
            places = {
                "near the head": (head, head + recent),
                "far behind": (head - half + _SEGMENT_RECORDS, head - _SEGMENT_RECORDS),
                "cold": (0, half - _SEGMENT_RECORDS),
            }
            return [
                row
                for age, (first, last) in places.items()
                for limit in (1, 256, 1000)
                for row in _pages(plan, server, age, first, last, limit)
            ]


def _pages(plan: Plan, server: Server, age: str, first: int, last: int, limit: int) -> list[Row]:
    starts = range(first, last - limit, limit)[: 20_000 // _READERS]
    requests = [diff_request(_TOPIC, start, limit) for start in starts]
    rates: list[float] = []
    spent: list[float] = []
    step = len(requests) // _READERS
    connections = [
        Connection(server.port, requests[place * step :], HttpAnswer()) for place in range(_READERS)
    ]
    with opened(connections):
        drive(connections, 0.2)
        for _ in range(plan.pick(4, 2)):
            before = server.cpu_s()
            load = drive(connections, plan.pick(1, 1))
            read = load.requests * limit
            rates.append(read / load.seconds)
            spent.append((server.cpu_s() - before) / read)
    is_judged = limit == 1000 and age != "cold"
    section = "6 diff"
    return [
        Row(
            section=section,
            what=f"{age}, limit {limit}",
            ours=statistics.median(rates),
            ceiling=_HOT_BAR if is_judged else None,
            against="the bar" if is_judged else "",
            unit="records/s",
            bar=1.0 if is_judged else None,
            note=_NOTE,
        ),
        Row(
            section=section,
            what=f"{age}, limit {limit}, server CPU",
            ours=statistics.median(spent) * 1e6,
            unit="us/record",
        ),
    ]
