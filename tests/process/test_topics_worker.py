"""Workers that use the client against a real server."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from tests.http_doubles import Mood, proxy
from tests.process.topics_server import KEY, serving

from penstock.topics import NotAQueue, TopicConfig, TopicNotFound
from penstock.topics.client import Unanswered
from penstock.topics.client.sync import Client

QUEUE = TopicConfig(type="queue", lease_ms=60_000, durable=True)


def test_a_job_from_claim_to_ack(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        client.put_topic("q", QUEUE)
        client.write("q", [{"a": 1}, 2, 3], tag="t")
        claimed = client.claim("q", "w", max=2)
        first, second = claimed.jobs()
        assert (first.seq, first.tag, json.loads(bytes(first.data)), claimed.ready) == (1, "t", {"a": 1}, 1)
        assert list(claimed.seqs) == [1, 2]
        extended = client.extend("q", "w", [first], lease_ms=120_000)
        assert extended.deadlines_ms[1] > first.deadline_ms
        assert client.nack("q", "w", [second], delay_ms=60_000).nacked == 1
        acked = client.ack("q", "w", [first, second])
        assert (acked.acked, acked.skipped, acked.ready, acked.in_flight) == (1, [2], 1, 0)
        assert acked.fsync_ms > 0
        assert client.ack("q", "w", [1]).skipped == [1]
        counts = client.state("q").queue
        assert counts is not None
        assert (counts.ready, counts.in_flight, counts.dead_lettered) == (1, 0, 0)


def test_a_worker_that_was_too_slow_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        client.put_topic("q", QUEUE)
        client.write("q", [1])
        slow = client.claim("q", "w", lease_ms=100).jobs()
        while not (quick := client.claim("q", "w").jobs()):
            time.sleep(0.01)
        assert client.ack("q", "w", slow).skipped == [1]
        assert client.ack("q", "w", quick).acked == 1


def test_errors_keep_their_kind(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        client.write("log", [1])
        with pytest.raises(NotAQueue, match="log"):
            client.claim("log", "w")
        with pytest.raises(TopicNotFound):
            client.ack("none", "w", [1])
        assert client.state("log").queue is None


def test_an_ack_without_an_answer_says_so_and_may_be_repeated(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, proxy(server.url) as between, server.client() as direct:
        direct.put_topic("q", QUEUE)
        direct.write("q", [1])
        jobs = direct.claim("q", "w").jobs()
        between.mood = Mood.LOSE_REPLY
        with Client(between.endpoint, key=KEY) as client, pytest.raises(Unanswered):
            client.ack("q", "w", jobs)
        assert direct.ack("q", "w", jobs).skipped == [1]
        assert direct.state("q").count == 0


@pytest.mark.timeout(180)
def test_every_job_is_done_though_the_server_is_killed_again_and_again(tmp_path: Path) -> None:
    """Workers go on through kills. A job is acked once at most, and in the end none is left."""
    data, total = tmp_path / "data", 600
    acked: list[int] = []
    for _ in range(4):
        with serving(data) as server, server.client() as client:
            if not client.metrics()["topics"]:
                client.put_topic("q", QUEUE)
                client.write("q", list(range(total)))
            workers = [threading.Thread(target=_work, args=[server.url, name, acked]) for name in "abcd"]
            for worker in workers:
                worker.start()
            before = len(acked)
            while len(acked) < before + total // 6:
                time.sleep(0.01)
            server.process.kill()
            for worker in workers:
                worker.join()
    assert len(acked) == len(set(acked)), "a job was acked twice"
    with serving(data) as server, server.client() as client:
        left = client.claim("q", "last", max=1000)
        assert not set(acked) & set(left.seqs), "an acked job came back"
        assert len(set(left.seqs)) == len(left.seqs) >= total - len(acked) - 4 * 4 * 7


def _work(url: str, node: str, acked: list[int]) -> None:
    """Until the server is gone."""
    with Client(url, key=KEY, retry_deadline="100ms") as client:
        try:
            while jobs := client.claim("q", node, max=7).jobs():
                result = client.ack("q", node, jobs)
                acked.extend(job.seq for job in jobs if job.seq not in result.skipped)
        except Exception:  # whatever a client meets when its server dies
            return


def test_jobs_come_by_themselves_and_go_back_when_the_worker_stops(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        client.put_topic("q", QUEUE)
        client.write("q", [1, 2, 3])
        done: list[int] = []
        for job in client.work("q", "w", max=2):
            if job.seq == 3:
                break
            done.append(client.ack("q", "w", [job]).acked)
        assert done == [1, 1]
        deadline = time.monotonic() + 5
        while (counts := client.state("q").queue) is not None and counts.in_flight:
            assert time.monotonic() < deadline, counts
        assert client.claim("q", "v").seqs == [3]


def test_a_worker_that_was_away_for_too_long_connects_again_by_itself(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        client.put_topic("q", QUEUE)
        client.write("q", [1])
        jobs = client.work("q", "w", lease_ms=200)
        assert next(jobs).deliveries == 1
        time.sleep(1.2)
        again = next(jobs)
        assert (again.seq, again.deliveries) == (1, 2)
        assert client.ack("q", "w", [again]).acked == 1


def test_a_work_stream_outlives_its_server_and_ends_with_its_queue(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as first:
        port = int(first.url.rpartition(":")[2])
        with Client(first.url, key=KEY, retry_deadline="20s") as client:
            client.put_topic("q", QUEUE)
            client.write("q", [1])
            jobs = client.work("q", "w")
            assert next(jobs).seq == 1
            first.process.kill()
            first.process.wait()
            with serving(data, port=port) as second, second.client() as other:
                again = next(jobs)
                assert (again.seq, again.deliveries) == (1, 1)
                other.ack("q", "w", [again])
                other.remove_topic("q")
                with pytest.raises(TopicNotFound):
                    next(jobs)
                other.write("log", [1])
                with pytest.raises(NotAQueue):
                    next(other.work("log", "w"))
