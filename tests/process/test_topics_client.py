"""The client and a real server, with what lies between them at its worst."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from tests.http_doubles import Mood, proxy
from tests.process.topics_server import FSYNC, KEY, serving

from penstock.errors import OutcomeUnknown, Unavailable
from penstock.topics.client import Unanswered
from penstock.topics.client.sync import Client


def everything(client: Client, topic: str) -> list[object]:
    """The data of every record, from the first to the head."""
    found: list[object] = []
    at = 0
    while True:
        page = client.diff(topic, at, limit=1000)
        assert page.tombstone is None
        found += [json.loads(bytes(record.data)) for record in page.records()]
        at = page.next_from_seq
        if page.caught_up:
            return found


@pytest.mark.parametrize("mood", [Mood.LOSE_REPLY, Mood.LOSE_REQUEST, Mood.FAIL_AFTER])
def test_a_write_is_there_once_however_often_its_answer_was_lost(tmp_path: Path, mood: Mood) -> None:
    with serving(tmp_path / "data") as server, proxy(server.url) as between, server.client() as direct:
        direct.put_topic("t", FSYNC)
        between.mood = mood
        healing = threading.Timer(1.0, setattr, (between, "mood", Mood.HONEST))
        healing.start()
        time.sleep(0.3)  # the server must have been up for longer than the first attempt takes
        with Client(between.endpoint, key=KEY, retry_deadline="20s") as client:
            written = client.write("t", [1, 2, 3])
        healing.join()
        assert (written.first_seq, written.last_seq) == (1, 3)
        assert everything(direct, "t") == [1, 2, 3]


def test_a_delete_whose_answer_was_lost_is_not_sent_again(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, proxy(server.url) as between, server.client() as direct:
        direct.write("t", [1, 2, 3], tag="x")
        between.mood = Mood.LOSE_REPLY
        with Client(between.endpoint, key=KEY) as client, pytest.raises(Unanswered):
            client.delete("t", match="x")
        assert direct.state("t").count == 0


@pytest.mark.timeout(180)
def test_no_write_is_lost_or_doubled_by_a_server_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """Writers go on through five kills. What was acknowledged is there; nothing at all is there twice."""
    data = tmp_path / "data"
    acked: list[int] = []
    unknown: list[int] = []
    done = threading.Event()

    def write(url: str, first: int) -> None:
        with Client(url, key=KEY, retry_deadline="30s") as client:
            number = first
            while not done.is_set():
                try:
                    client.write("t", [number])
                    acked.append(number)
                except OutcomeUnknown:
                    unknown.append(number)
                except Unavailable:
                    pass  # certainly not applied
                number += 4

    with serving(data) as server:
        url = server.url
        with server.client() as client:
            client.put_topic("t", FSYNC)
    port = int(url.rpartition(":")[2])
    writers = [threading.Thread(target=write, args=(url, first)) for first in range(4)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(5):
            with serving(data, port) as server:
                time.sleep(1.0)
                server.process.kill()
        with serving(data, port) as server:
            time.sleep(0.5)
            done.set()
            for writer in writers:
                writer.join(timeout=40)
            with server.client() as client:
                found = everything(client, "t")
    finally:
        done.set()
    assert len(acked) > 50
    assert len(set(map(str, found))) == len(found)
    assert set(acked) <= set(found)
    assert set(found) <= set(acked) | set(unknown)
    for first in range(4):
        own = [number for number in found if isinstance(number, int) and number % 4 == first]
        assert own == sorted(own)
