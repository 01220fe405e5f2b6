"""A real server with routers, killed for real while records are written, copied and read."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest
from tests.process.topics_server import Server, serving

from penstock.errors import PenstockError
from penstock.topics import Durability, RouterConfig, TopicConfig
from penstock.topics.client.sync import Client

SEED = int(os.environ.get("PENSTOCK_KILL_SEED", "1"))
DESTS = {"audit": "orders", "copy": "orders", "chain": "audit"}
"""The source of each destination."""


class Notes:
    """What was acknowledged, what was tried, and what was read where."""

    def __init__(self) -> None:
        self.acked: list[str] = []
        self.tried: list[str] = []
        self.seen: dict[str, dict[int, str]] = {dest: {} for dest in DESTS}

    def check(self, client: Client) -> None:
        for dest in DESTS:
            found = read_all(client, dest)
            for seq, value in self.seen[dest].items():
                assert found.get(seq) == value, f"{dest} {seq} was {value} and is {found.get(seq)}"
            copied = [value for value in found.values() if value.startswith("order")]
            assert len(set(copied)) == len(copied), f"{dest}: a record is there twice"
            assert copied == sorted(copied), f"{dest} is out of order"
            assert set(self.acked) <= set(copied), f"{dest}: {set(self.acked) - set(copied)} are missing"
            assert set(copied) <= set(self.tried), f"{dest}: phantoms"
            self.seen[dest] = found


def read_all(client: Client, topic: str) -> dict[int, str]:
    found: dict[int, str] = {}
    at = 0
    while True:
        page = client.diff(topic, at, limit=1000)
        assert page.tombstone is None
        found |= {record.seq: json.loads(bytes(record.data)) for record in page.records()}
        at = page.next_from_seq
        if page.caught_up:
            return found


def live_on(server: Server, notes: Notes, stop: threading.Event, job: int) -> None:
    with server.client(retry_deadline="0s") as client:
        while not stop.is_set():
            try:
                if job == 0:
                    value = f"order{len(notes.tried):06d}"
                    notes.tried.append(value)
                    client.write("orders", [value])
                    notes.acked.append(value)
                elif job == 1:
                    client.write("audit", [f"direct{time.monotonic_ns()}"])
                else:
                    for dest in DESTS:
                        notes.seen[dest] |= read_all(client, dest)
            except PenstockError:
                return


@pytest.mark.timeout(120)
def test_copies_survive_the_death_of_their_server(tmp_path: Path) -> None:
    rng, notes = random.Random(SEED), Notes()
    fsync = TopicConfig(durability=Durability.FSYNC)
    for life in range(5):
        with serving(tmp_path / "data") as server, server.client() as client:
            if life == 0:
                for topic in ("orders", *DESTS):
                    client.put_topic(topic, fsync)
                for dest, source in DESTS.items():
                    client.put_router(f"to-{dest}", RouterConfig(source=source, dest=dest))
            notes.check(client)
            stop = threading.Event()
            threads = [threading.Thread(target=live_on, args=(server, notes, stop, job)) for job in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.5 + rng.random())
            server.process.kill()
            stop.set()
            for thread in threads:
                thread.join()
    with serving(tmp_path / "data") as server, server.client() as client:
        notes.check(client)
        assert len(notes.acked) > 20
