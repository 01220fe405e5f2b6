"""Measure the cost of a watching console: `python benchmarks/console.py`.

The speed of a shared machine varies from second to second by more than the cost of a console, so sequential
turns are not comparable. Therefore two equal worlds run simultaneously on one core. Each is a server with its
console and its writers, and the scheduler gives each half of that core, a few milliseconds at a time. Changes
of the machine's speed affect both equally. One of them is watched; then they swap roles. All CPU that
watching uses, in the server or in the console, reduces the writes of that world. Each has half a core, so a
cost appears as twice its share of a core. Data is in memory if possible, because waiting for a disk would
give the core to the other world.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from console_stage import Host, Page, cpu_s, with_topics
from pairs import Estimate
from rounds import Plan, scratch
from sections import run_planned
from table import Row
from topics_server import Server

OVERHEAD = 0.03
_MEMORY = "/dev/shm"
_START_S = 0.2


@dataclass(frozen=True, slots=True)
class Turn:
    """Results of one world in one turn."""

    records: int
    seconds: float
    server_s: float
    console_s: float

    @property
    def rate(self) -> float:
        return self.records / self.seconds

    @property
    def cost_s(self) -> float:
        """CPU seconds of server and console per record."""
        return (self.server_s + self.console_s) / self.records


@dataclass(frozen=True, slots=True)
class Pair:
    """Two turns, in the second of which the other world is watched. Differences between the worlds cancel
    out."""

    watched: tuple[Turn, Turn]
    alone: tuple[Turn, Turn]

    @property
    def rates(self) -> float:
        quotients = [ours.rate / theirs.rate for ours, theirs in zip(self.watched, self.alone, strict=True)]
        return math.sqrt(math.prod(quotients))

    @property
    def costs(self) -> float:
        quotients = [
            ours.cost_s / theirs.cost_s for ours, theirs in zip(self.watched, self.alone, strict=True)
        ]
        return math.sqrt(math.prod(quotients))


class World:
    """A server, a console and writers in their own session, which is the scheduler's unit of fairness."""

    def __init__(self, root: Path, topics: int, core: int) -> None:
        program = Path(__file__).with_name("console_world.py")
        command = [sys.executable, str(program), str(root), str(topics), str(core)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def answer(self) -> Mapping[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a world ended; its messages say why")
        found: Mapping[str, float] = json.loads(line)
        return found

    def order(self, **order: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()


@contextmanager
def _worlds(topics: int, plan: Plan) -> Iterator[tuple[World, World]]:
    """Start both worlds on one core."""
    core = max(os.sched_getaffinity(0))
    with ExitStack() as stack:
        root = Path(
            tempfile.mkdtemp(prefix="penstock-bench-", dir=_MEMORY if _has_memory() else plan.workdir)
        )
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        worlds = []
        for name in ("one", "two"):
            worlds.append(World(root / name, topics, core))
            stack.callback(worlds[-1].close)
        for world in worlds:
            world.answer()
        yield worlds[0], worlds[1]


def _has_memory() -> bool:
    return os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 << 30


def _are_groups(worlds: tuple[World, World]) -> bool:
    """Return whether the scheduler gives equal shares to sessions rather than to threads."""
    try:
        groups = {Path(f"/proc/{world.pid}/autogroup").read_text().split()[0] for world in worlds}
        enabled = Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip()
        cgroups = Path("/proc/self/cgroup").read_text().splitlines()
    except (OSError, IndexError):
        return False
    at_root = all(line.endswith(":/") for line in cgroups if ":cpu" in line or line.startswith("0::"))
    return enabled == "1" and len(groups) == len(worlds) and at_root


def _turn(worlds: tuple[World, World], watched: int, seconds: float) -> tuple[Turn, Turn]:
    """Run a turn of the watched world and of the other one."""
    begin = time.monotonic() + _START_S
    for place, world in enumerate(worlds):
        world.order(begin=begin, watched=place == watched, seconds=seconds)
    turns = [Turn(**world.answer()) for world in worlds]  # type: ignore[arg-type]
    return turns[watched], turns[1 - watched]


def _pair(worlds: tuple[World, World], first: int, seconds: float) -> Pair:
    one = _turn(worlds, first, seconds)
    two = _turn(worlds, 1 - first, seconds)
    return Pair(watched=(one[0], two[0]), alone=(one[1], two[1]))


def _ingest(plan: Plan, topics: int) -> list[Row]:
    seconds = plan.pick(10, 2)  # the slowest poll runs every 10 s, and first when the page opens
    with _worlds(topics, plan) as worlds:
        are_groups = _are_groups(worlds)
        _turn(worlds, 0, 2.0)  # warm-up
        pairs = [_pair(worlds, number % 2, seconds) for number in range(plan.pick(12, 4))]
    return _rows(pairs, f", {topics:,} other topics" if topics else "", are_groups=are_groups)


def _rows(pairs: Sequence[Pair], kind: str, *, are_groups: bool) -> list[Row]:
    rates, costs = [pair.rates for pair in pairs], [pair.costs for pair in pairs]
    rate, cost = Estimate.of(rates), Estimate.of(costs)
    watched = [turn for pair in pairs for turn in pair.watched]
    alone = [turn for pair in pairs for turn in pair.alone]
    shares = (
        "two worlds, each with half a core"
        if are_groups
        else ("not judged: the scheduler shares by thread here, so the console takes from both worlds")
    )
    return [
        Row(
            section="ingest",
            what=f"records, watched{kind}",
            ours=statistics.median(turn.rate for turn in watched),
            unit="records/s",
            ceiling=statistics.median(turn.rate for turn in alone),
            against="the other world, at the same time",
            ratio=rate.low,
            bar=1 - OVERHEAD if are_groups else None,
            note=f"records{kind}: {rate} of those without a watcher; the ratio is the low end; {shares}; "
            f"pairs of turns: {_listed(rates)}",
        ),
        Row(
            section="ingest",
            what=f"CPU of server and console for a record{kind}",
            ours=statistics.median(turn.cost_s for turn in watched) * 1e6,
            unit="µs",
            ceiling=statistics.median(turn.cost_s for turn in alone) * 1e6,
            against="the other world, at the same time",
            ratio=cost.high,
            bar=1 + OVERHEAD,
            at_most=True,
            note=f"CPU{kind}: {cost} of that without a watcher; the ratio is the high end; "
            f"pairs of turns: {_listed(costs)}",
        ),
        Row(
            section="ingest",
            what=f"CPU of the console{kind}",
            ours=statistics.median(turn.console_s / turn.seconds for turn in watched) * 100,
            unit="% of a core",
        ),
    ]


def _listed(quotients: Sequence[float]) -> str:
    return " ".join(f"{each:.3f}" for each in sorted(quotients))


def _standing(plan: Plan, topics: int) -> list[Row]:
    """Measure the CPU that watching costs an idle server and the console."""
    seconds = plan.pick(30, 4)
    with scratch(plan) as root, Server(root) as server, Host(with_topics(server, topics)) as host:
        page, shares = Page(host.port), {}
        for is_watched in (False, True):
            if is_watched:
                page.open()
            time.sleep(2)  # after the first polls
            before, began = (cpu_s(server.pid), cpu_s(host.pid)), time.monotonic()
            time.sleep(seconds)
            after, took = (cpu_s(server.pid), cpu_s(host.pid)), time.monotonic() - began
            shares[is_watched] = [(now - then) / took for now, then in zip(after, before, strict=True)]
        page.close()
    added = [max(0.0, now - then) for now, then in zip(shares[True], shares[False], strict=True)]
    return [
        Row(
            section="standing",
            what="CPU of server and console" + (f", {topics:,} topics" if topics else ""),
            ours=sum(added) * 100,
            unit="% of a core",
            ceiling=100.0,
            against="the core that the server's loop has",
            ratio=sum(added),
            bar=OVERHEAD,
            at_most=True,
            note=f"what watching adds where nobody writes, {topics:,} topics: "
            f"{added[0]:.2%} of a core by the server, {added[1]:.2%} by the console",
        )
    ]


def standing(plan: Plan) -> list[Row]:
    """Measure with few and with many topics."""
    return [*_standing(plan, 0), *_standing(plan, plan.pick(10_000, 1_000))]


def few(plan: Plan) -> list[Row]:
    """Measure with one topic."""
    return _ingest(plan, 0)


def many(plan: Plan) -> list[Row]:
    """Measure with ten thousand topics besides the written one."""
    return _ingest(plan, plan.pick(10_000, 1_000))


if __name__ == "__main__":
    sys.exit(
        run_planned(
            "Measure what a watching console costs.",
            {"standing": standing, "few": few, "many": many},
            quick="short turns and fewer topics; about a minute and a half",
        )
    )
