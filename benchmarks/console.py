"""What a watching console costs: `python benchmarks/console.py`.

Writers keep a topics server busy, with and without somebody who watches the console, in turns. The console
runs in a process of its own, as in `penstock up`, and is there in both cases. It shares the machine with the
server and the writers, so its own work is part of what is measured. Read the ratios; on a busy machine that
of the server's CPU per record is the steadier one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rounds import Plan, interleave, scratch
from sections import run_planned
from table import Row
from topics_load import Connection, HttpAnswer, drive
from topics_server import Server, bodies, opened, texts, write_requests

BATCH = 100
WRITERS = 4
OVERHEAD = 0.03


class Host:
    """The console's process, told when somebody watches."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("console_host.py")), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()

    def order(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError("the console ended")

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def _hosting(url: str) -> Iterator[Host]:
    host = Host(url)
    try:
        yield host
    finally:
        host.close()


def _ingest(plan: Plan, topics: int) -> list[Row]:
    seconds = plan.pick(2, 1)  # short turns, and many: what comes and goes hits both alike
    with scratch(plan) as root, Server(root) as server, _hosting(f"http://127.0.0.1:{server.port}") as host:
        for number in range(topics):
            server.ask("PUT", f"/v0/topics/other-{number:05d}", {})
        requests = write_requests("ingest", bodies(texts(WRITERS * BATCH * 2), BATCH))
        console: dict[str, list[float]] = {"watched": [], "alone": []}
        served: dict[str, list[float]] = {"watched": [], "alone": []}

        def run(name: str) -> float:
            host.order("watch" if name == "watched" else "rest")
            os.sync()
            before, served_before = host.cpu_s(), server.cpu_s()
            with opened([Connection(server.port, requests, HttpAnswer()) for _ in range(WRITERS)]) as writers:
                load = drive(writers, seconds)
            written = load.requests * BATCH
            console[name].append((host.cpu_s() - before) / load.seconds)
            served[name].append((server.cpu_s() - served_before) / written)
            return load.seconds / written

        rates = interleave(
            {"watched": lambda: run("watched"), "alone": lambda: run("alone")},
            work=1.0,
            rounds=plan.pick(30, 20),
            patience_s=plan.pick(180, 60),
        )
    kind = f", {topics:,} other topics" if topics else ""
    each = [ours / theirs for ours, theirs in zip(served["watched"], served["alone"], strict=True)]
    return [
        Row(
            section="ingest",
            what=f"records, watched{kind}",
            ours=rates.median("watched"),
            unit="records/s",
            ceiling=rates.median("alone"),
            against="the same without anybody watching",
            ratio=rates.ratio("watched", "alone"),
            bar=1 - OVERHEAD,
            note="writes of 100 records over 4 connections; one live stream, and a page of topics every 2 s",
        ),
        Row(
            section="ingest",
            what=f"CPU of the server for a record{kind}",
            ours=statistics.median(served["watched"]) * 1e6,
            unit="µs",
            ceiling=statistics.median(served["alone"]) * 1e6,
            against="the same without anybody watching",
            ratio=statistics.median(each),
            bar=1 + OVERHEAD,
            at_most=True,
        ),
        Row(
            section="ingest",
            what=f"CPU of the console{kind}",
            ours=statistics.median(console["watched"]) * 100,
            unit="% of a core",
        ),
    ]


def _standing(plan: Plan, topics: int) -> list[Row]:
    """The CPU that watching takes of a server that has nothing else to do: steady on a busy machine too."""
    seconds = plan.pick(30, 10)
    with scratch(plan) as root, Server(root) as server, _hosting(f"http://127.0.0.1:{server.port}") as host:
        for number in range(topics):
            server.ask("PUT", f"/v0/topics/other-{number:05d}", {})
        shares = {}
        for order in ("rest", "watch"):
            host.order(order)
            time.sleep(3)  # past the first looks
            before, began = server.cpu_s(), time.perf_counter()
            time.sleep(seconds)
            shares[order] = (server.cpu_s() - before) / (time.perf_counter() - began)
    added = max(0.0, shares["watch"] - shares["rest"])
    return [
        Row(
            section="standing",
            what="CPU of a watched server" + (f", {topics:,} topics" if topics else ""),
            ours=added * 100,
            unit="% of a core",
            ceiling=100.0,
            against="the core that its loop has",
            ratio=added,
            bar=OVERHEAD,
            at_most=True,
            note="what watching adds to a server that nobody writes to",
        )
    ]


def standing(plan: Plan) -> list[Row]:
    """With few topics and with many."""
    return [*_standing(plan, 0), *_standing(plan, plan.pick(10_000, 2_000))]


def few(plan: Plan) -> list[Row]:
    """One topic."""
    return _ingest(plan, 0)


def many(plan: Plan) -> list[Row]:
    """Ten thousand topics beside the one that is written."""
    return _ingest(plan, plan.pick(10_000, 2_000))


if __name__ == "__main__":
    sys.exit(
        run_planned(
            "Measure what a watching console costs.",
            {"standing": standing, "few": few, "many": many},
            quick="about a minute",
        )
    )
