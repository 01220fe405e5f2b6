"""Latency and throughput of acknowledged writes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count

import peers
from rounds import Plan, Rates, interleave, scratch
from table import Row
from topics_load import Connection, HttpAnswer, Load, drive
from topics_peers import jetstream, redis_streams
from topics_server import RECORD_BYTES, Server, bodies, opened, texts, write_requests

__all__ = ["batches", "latency", "singles"]

WRITERS = 16
_CLASSES = ("disk", "fsync")
_NUMBERS = count()
_LATENCY = "one connection, one request at a time, over loopback"
_BATCHES = (
    f"{WRITERS} connections, one request at a time each, records of {RECORD_BYTES} B into one topic, load "
    "generator on the same two cores; server CPU: user and system time of all its threads, checkpoints and "
    "file preparation included"
)
_PEERS = (
    f"{WRITERS} connections, {RECORD_BYTES} B, the same load generator with raw protocols; Redis Streams: a "
    "pipeline of XADD per batch, appendonly yes, appendfsync everysec beside disk, always beside fsync; NATS "
    "JetStream: a batch is published, then all its acknowledgements awaited; file store, sync_interval always"
)


class _Topic:
    """A fresh topic of one durability class, deleted afterwards, with the server's CPU time for it."""

    def __init__(self, server: Server, durability: str) -> None:
        self._server = server
        self.name = f"{durability}-{next(_NUMBERS)}"
        server.ask("PUT", f"/v0/topics/{self.name}", {"durability": durability})

    @contextmanager
    def writers(self, records: Sequence[bytes], batch: int, number: int) -> Iterator[list[Connection]]:
        requests = write_requests(self.name, bodies(records, batch))
        connections = [
            Connection(self._server.port, requests[place % len(requests) :], HttpAnswer())
            for place in range(number)
        ]
        with opened(connections):
            yield connections
        self._server.ask("DELETE", f"/v0/topics/{self.name}")

    def check(self, acknowledged: int) -> None:
        found = self._server.ask("GET", f"/v0/topics/{self.name}")["count"]
        assert found == acknowledged, f"{self.name} holds {found} of {acknowledged} records"


def latency(plan: Plan) -> list[Row]:
    """Measure one writer with one record and with a hundred, for both classes."""
    rows: list[Row] = []
    records = texts(2000)
    with scratch(plan) as root, Server(root) as server:
        for durability in _CLASSES:
            for batch in (1, 100):
                topic = _Topic(server, durability)
                with topic.writers(records, batch, 1) as writers:
                    drive(writers, 0.3)
                    load = drive(writers, plan.pick(3, 1))
                for what, share in (("p50", 0.5), ("p99", 0.99)):
                    rows.append(
                        Row(
                            section="1 write acknowledgement, one writer",
                            what=f"{durability}, {batch} record{'s' * (batch > 1)}, {what}",
                            ours=load.percentile_ms(share),
                            unit="ms",
                            note=_LATENCY,
                        )
                    )
    return rows


def singles(plan: Plan) -> list[Row]:
    """Measure one record per request over many connections, with every response synced."""
    loads: list[Load] = []
    spent: list[float] = []
    with scratch(plan) as root, Server(root) as server:
        for turn in range(plan.pick(4, 2) + 1):
            topic = _Topic(server, "fsync")
            with topic.writers(texts(64), 1, 64) as writers:
                before = server.cpu_s()
                load = drive(writers, plan.pick(3, 2))
                topic.check(load.requests)
            if turn:
                loads.append(load)
                spent.append((server.cpu_s() - before) / load.requests)
    section = "3 single records, 64 connections, fsync"
    rate = statistics.median(load.requests / load.seconds for load in loads)
    return [
        _above(section, "requests per second", rate, 20_000, "requests/s"),
        Row(
            section=section,
            what="p50",
            ours=statistics.median(load.percentile_ms(0.5) for load in loads),
            unit="ms",
        ),
        Row(
            section=section,
            what="p99",
            ours=statistics.median(load.percentile_ms(0.99) for load in loads),
            ceiling=10.0,
            against="the bar",
            unit="ms",
            bar=1.0,
            at_most=True,
        ),
        Row(section=section, what="server CPU", ours=statistics.median(spent) * 1e6, unit="us/request"),
    ]


def batches(plan: Plan) -> list[Row]:
    """Measure batches of 100 and of 1000 for both classes, compared with the installed peers."""
    with scratch(plan) as root, ExitStack() as stack:
        server = stack.enter_context(Server(root / "ours"))
        ports: dict[str, int] = {}
        if not peers.missing():
            for peer, fsync in (("Redis everysec", "everysec"), ("Redis always", "always")):
                folder = root / peer.replace(" ", "-")
                ports[peer] = stack.enter_context(peers.redis_server(folder, fsync=fsync))
            ports["NATS sync always"] = stack.enter_context(peers.nats_server(root / "nats"))
        rows: list[Row] = []
        rows += _of_size(plan, server, ports, 100, 350_000)
        # JetStream refuses this many outstanding messages.
        ports.pop("NATS sync always", None)
        rows += _of_size(plan, server, ports, 1000, 800_000)
    return sorted(rows, key=lambda row: row.section)


def _of_size(plan: Plan, server: Server, ports: dict[str, int], batch: int, bar: float) -> list[Row]:
    records, seconds = texts(WRITERS * batch * 2), plan.pick(2, 1)
    spent: dict[str, list[float]] = {durability: [] for durability in _CLASSES}

    def ours(durability: str) -> float:
        os.sync()  # so that no contender pays for another's unwritten data
        topic = _Topic(server, durability)
        with topic.writers(records, batch, WRITERS) as writers:
            before = server.cpu_s()
            load = drive(writers, seconds)
            written = load.requests * batch
            spent[durability].append((server.cpu_s() - before) / written)
            topic.check(written)
        return load.seconds / written

    def theirs(peer: str) -> float:
        os.sync()
        write = jetstream if peer.startswith("NATS") else redis_streams
        sent, load = write(ports[peer], records, batch=batch, writers=WRITERS, seconds=seconds)
        return load.seconds / sent

    contenders: dict[str, Callable[[], float]] = {
        **{durability: partial(ours, durability) for durability in _CLASSES},
        **{peer: partial(theirs, peer) for peer in ports},
    }
    rates = interleave(contenders, work=1.0, rounds=plan.pick(5, 2), patience_s=plan.pick(60, 10))
    return [*_throughput(rates, spent, batch, bar), *_beside(rates, list(ports), batch)]


def _throughput(rates: Rates, spent: dict[str, list[float]], batch: int, bar: float) -> list[Row]:
    section = f"4 {WRITERS} writers"
    rows: list[Row] = []
    for durability in _CLASSES:
        what, rate = f"{durability}, batches of {batch}", rates.median(durability)
        if durability == "fsync":
            rows.append(_above(section, what, rate, bar, "records/s", _BATCHES))
        else:
            rows.append(Row(section=section, what=what, ours=rate, unit="records/s", note=_BATCHES))
        cpu = statistics.median(spent[durability][1:]) * 1e6
        rows.append(Row(section=section, what=f"{what}, server CPU", ours=cpu, unit="us/record"))
    return rows


def _beside(rates: Rates, names: Sequence[str], batch: int) -> list[Row]:
    return [
        Row(
            section="5 peers at equal durability",
            what=f"{durability}, batches of {batch}",
            ours=rates.median(durability),
            ceiling=rates.median(peer),
            ratio=rates.ratio(durability, peer),
            against=peer,
            unit="records/s",
            bar=1.0 if peer.startswith("Redis") else None,
            note=_PEERS,
        )
        for peer, durability in (
            ("Redis everysec", "disk"),
            ("Redis always", "fsync"),
            ("NATS sync always", "fsync"),
        )
        if peer in names
    ]


def _above(section: str, what: str, ours: float, bar: float, unit: str, note: str = "") -> Row:
    return Row(
        section=section, what=what, ours=ours, ceiling=bar, against="the bar", unit=unit, bar=1.0, note=note
    )
