"""Engines that are killed at random while they take writes of every class. Run by its test, as a program:

    topics_torture.py DIRECTORY SEED SECONDS

The parent has no threads, so it can fork an engine in a millisecond and kill it a moment later. An engine
writes a line to a journal before each call and another, synced, after its answer. After each kill a copy of
the data directory is opened and compared with the journal; the next engine recovers the original.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from penstock.topics import Durability, Engine, EngineConfig, NewRecord, Predicate, TopicConfig

CAP = 40
TOPICS = {
    "fsync": TopicConfig(durability=Durability.FSYNC),
    "disk": TopicConfig(durability=Durability.DISK),
    "memory": TopicConfig(durability=Durability.MEMORY),
    "capped": TopicConfig(durability=Durability.FSYNC, cap_records=CAP),
    "tagged": TopicConfig(durability=Durability.FSYNC),
    "ephemeral": TopicConfig(durability=Durability.EPHEMERAL),
}
LANES = 2


def config_of(root: Path, data: str, shards: int) -> EngineConfig:
    return EngineConfig(
        data_dir=str(root / data),
        cold_dir=str(root / f"{data}-cold"),
        wal_shards=shards,
        wal_file_bytes=32 * 1024,
        segment_max_events=150,
        hot_retain_segments=1,
        checkpoint_bytes=24 * 1024,
        checkpoint_interval_ms=300,
        sync_interval_ms=20,
    )


class Journal:
    """One line per event, in one write each."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, *words: object, durable: bool = False) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())
        if durable:
            os.fdatasync(self._fd)


# ---- the one that is killed --------------------------------------------------------------------------


async def write_lane(engine: Engine, journal: Journal, topic: str, lane: str, rng: random.Random) -> None:
    for number in itertools.count():
        count = rng.choice([1, 1, 1, 2, 5, 20])
        call = f"{lane}.{number}"
        tag = call if topic == "tagged" else None
        texts = [f'"{call}.{place}"'.encode() for place in range(count)]
        records = [NewRecord(msgspec.Raw(text), tag=tag) for text in texts]
        journal.note("started", topic, call, count)
        result = await engine.write(topic, records, create=False)
        journal.note("acked", topic, call, result.first_seq, result.last_seq, durable=True)
        if topic == "tagged" and rng.random() < 0.5:
            journal.note("deleting", topic, call)
            await engine.delete(topic, match=Predicate(value=call))
            journal.note("deleted", topic, call, durable=True)


async def write_forever(root: Path, name: str, shards: int) -> None:
    rng = random.Random(name)
    journal = Journal(root / "journal")
    engine = await Engine.open(config_of(root, "data", shards))
    assert engine.problems == [], engine.problems
    for topic, config in TOPICS.items():
        await engine.put_topic(topic, config)
    journal.note("ready", name)
    lanes = [(topic, f"{name}-{topic}-{lane}") for topic in TOPICS for lane in range(LANES)]
    await asyncio.gather(*(write_lane(engine, journal, topic, lane, rng) for topic, lane in lanes))


# ---- what must be there ------------------------------------------------------------------------------


class Told:
    """The journal, by topic."""

    def __init__(self, path: Path) -> None:
        self.started: defaultdict[str, set[str]] = defaultdict(set)
        self.acked: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self.maybe_deleted: set[str] = set()
        self.deleted: set[str] = set()
        for line in path.read_text().splitlines():
            kind, *words = line.split(" ")
            if kind == "started":
                self.started[words[0]] |= {f"{words[1]}.{place}" for place in range(int(words[2]))}
            elif kind == "acked":
                first, last = int(words[2]), int(words[3])
                for seq in range(first, last + 1):
                    # An ephemeral topic continues after its last checkpoint.
                    assert words[0] == "ephemeral" or seq not in self.acked[words[0]], (
                        f"{words[0]} {seq} was acknowledged twice"
                    )
                    self.acked[words[0]][seq] = f"{words[1]}.{seq - first}"
            elif kind == "deleting":
                self.maybe_deleted.add(words[1])
            elif kind == "deleted":
                self.deleted.add(words[1])


async def check(root: Path, data: str, shards: int) -> None:
    told = Told(root / "journal")
    async with await Engine.open(config_of(root, data, shards)) as engine:
        assert engine.problems == [], engine.problems
        for topic in TOPICS:
            if engine.exists(topic):
                await check_topic(engine, topic, told)
            else:
                assert not told.acked[topic], f"{topic} is lost"


async def check_topic(engine: Engine, topic: str, told: Told) -> None:
    found = await everything(engine, topic)
    state = engine.state(topic)
    acked = told.acked[topic]
    phantoms = set(found.values()) - told.started[topic]
    assert not phantoms, f"{topic}: phantoms {sorted(phantoms)[:5]}"
    assert len(set(found.values())) == len(found), f"{topic}: a record is there twice"
    wrong = [seq for seq, value in found.items() if acked.get(seq, value) != value]
    assert not wrong, f"{topic}: sequences were used twice: {wrong[:5]}"
    if topic == "ephemeral":
        assert state.config == TOPICS[topic].resolved(topic), "the config survives"
        assert not found, "the records do not"
        return
    must = {seq: value for seq, value in acked.items() if _call(value) not in told.maybe_deleted}
    if topic == "capped":
        must = {seq: value for seq, value in must.items() if seq > state.head_seq - CAP}
        assert len(found) <= CAP
    lost = [seq for seq in must if seq not in found]
    assert not lost, f"{topic}: lost {lost[:5]} of {len(must)}, head is {state.head_seq}"
    back = [value for value in found.values() if _call(value) in told.deleted]
    assert not back, f"{topic}: deleted records came back: {back[:5]}"
    if topic in ("fsync", "memory"):
        assert sorted(found) == list(range(1, state.head_seq + 1)), f"{topic} has gaps"
        assert state.head_seq <= len(told.started[topic])
    if topic == "disk":
        assert state.head_seq >= max(acked, default=0)


def _call(value: str) -> str:
    return value.rpartition(".")[0]


async def everything(engine: Engine, topic: str) -> dict[int, str]:
    found: dict[int, str] = {}
    cursor = 0
    while True:
        page = await engine.diff(topic, cursor, limit=1000)
        found |= {record.seq: json.loads(bytes(record.data)) for record in page.records()}
        cursor = page.next_from_seq
        if page.caught_up:
            return found


# ---- the one that kills ------------------------------------------------------------------------------


def fork(work: object, *arguments: object) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(work(*arguments))  # type: ignore[operator]
            code = 0
        except BaseException as error:
            os.write(2, f"{work.__name__}: {type(error).__name__}: {error}\n".encode())  # type: ignore[attr-defined]
        finally:
            os._exit(code)
    return pid


def wait_until_ready(journal: Path, name: str, pid: int) -> None:
    line = f"ready {name}\n"
    for _ in range(6000):
        if journal.exists() and line in journal.read_text():
            return
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "an engine failed by itself"
        time.sleep(0.005)
    raise AssertionError("an engine did not start")


def main(root: Path, seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    deadline = time.monotonic() + seconds
    kills = 0
    while time.monotonic() < deadline:
        shards = rng.choice([1, 2, 2, 3])
        name = f"e{kills}"
        pid = fork(write_forever, root, name, shards)
        if rng.random() < 0.8:
            wait_until_ready(root / "journal", name, pid)
            time.sleep(rng.uniform(0.0, 0.5))
        else:
            time.sleep(rng.uniform(0.0, 0.05))  # killed while it recovers
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "an engine failed by itself"
        kills += 1
        if (root / "data").exists() and (root / "journal").exists():
            verify(root, rng.choice([1, 2, 3]))
    acked = sum(line.startswith("acked") for line in (root / "journal").read_text().splitlines())
    sys.stdout.write(json.dumps({"kills": kills, "acked": acked}) + "\n")


def verify(root: Path, shards: int) -> None:
    for source, target in (("data", "copy"), ("data-cold", "copy-cold")):
        shutil.rmtree(root / target, ignore_errors=True)
        if (root / source).exists():
            shutil.copytree(root / source, root / target)
    _, status = os.waitpid(fork(check, root, "copy", shards), 0)
    assert status == 0, "what is on disk is not what the journal says"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
