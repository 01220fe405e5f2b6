"""§9: the work stream over real connections, HTTP/1.1 and cleartext HTTP/2."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.contract.topics_server import PROTOCOLS, Api, Server, fresh_name, serving


@dataclass
class Event:
    """One frame; a comment has no name."""

    name: str
    data: Any
    id: str = ""


class Worker:
    """The events of one stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def next(self) -> Event:
        fields: dict[str, str] = {}
        for line in self._lines:
            if not line and fields:
                if "event" not in fields:
                    return Event("", fields)
                return Event(fields["event"], json.loads(fields["data"]), fields.get("id", ""))
            if line:
                name, _, value = line.partition(":")
                assert name not in fields
                fields[name] = value.removeprefix(" ")
        raise EOFError

    def jobs(self, count: int) -> list[int]:
        events = [self.next() for _ in range(count)]
        assert [event.name for event in events] == ["job"] * count
        return [event.data["$seq"] for event in events]


@contextlib.contextmanager
def working(
    server: Server, topic: str, *, protocol: str = "h1", key: str | None = None, **query: object
) -> Iterator[Worker]:
    """An open stream that has received its retry time."""
    api = server.api(protocol, key)
    params = {"node": "w", **{name: str(value) for name, value in query.items()}}
    with api.client.stream("GET", f"/v0/topics/{topic}/work", params=params) as response:
        assert response.status_code == 200, response.read()
        worker = Worker(response)
        assert worker.next() == Event("", {"retry": "2000"})
        try:
            yield worker
        finally:
            api.client.close()  # over HTTP/2 it would keep the connection and not leave the stream


def post(api: Api, topic: str, verb: str, *seqs: int, **fields: object) -> Any:
    body = {"node": "w", **({"seqs": seqs} if verb != "claim" else {}), **fields}
    return api.ask("POST", f"/v0/topics/{topic}/{verb}", body)


def until(api: Api, topic: str, **counts: int) -> None:
    """Wait for these counts, which must appear before a lease expires."""
    deadline = time.monotonic() + 5
    while (found := api.state(topic)["queue"]) != found | counts:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


@pytest.fixture
def queue(h1: Api) -> str:
    topic = fresh_name("work")
    h1.put(topic, type="queue", lease_ms=600_000)
    return topic


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_begins_with_its_headers_and_then_the_jobs(
    server: Server, h1: Api, queue: str, protocol: str
) -> None:
    h1.write_records(queue, [{"data": {"a": 1}, "tag": "t", "node": "n", "meta": {"m": 1}}, {"data": None}])
    with working(server, queue, protocol=protocol, max=2, lease_ms=300_000) as worker:
        headers = worker.response.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
        first, second = worker.next(), worker.next()
        assert (first.name, first.id, second.id) == ("job", "1", "2")
        left_ms = first.data.pop("deadline") - time.time_ns() // 1_000_000
        assert 290_000 < left_ms <= 300_000
        assert first.data.pop("$ts") > 0
        assert first.data == {
            "topic": queue,
            "$seq": 1,
            "lease_id": "lease_1",
            "$tag": "t",
            "deliveries": 1,
            "data": {"a": 1},
            "meta": {"m": 1},
        }
        assert second.data.keys() == {"topic", "$seq", "lease_id", "deadline", "$ts", "deliveries", "data"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_stream_is_refilled_on_publish_ack_and_nack(
    server: Server, h1: Api, queue: str, protocol: str
) -> None:
    with working(server, queue, protocol=protocol) as worker:
        h1.write(queue, 1, 2)
        assert worker.jobs(1) == [1]
        assert h1.state(queue)["queue"] == {"ready": 1, "in_flight": 1, "dead_lettered": 0}
        assert post(h1, queue, "ack", 1)["acked"] == 1
        assert worker.jobs(1) == [2]
        assert post(h1, queue, "nack", 2)["nacked"] == 1
        again = worker.next()
        assert (again.data["$seq"], again.data["deliveries"], again.data["lease_id"]) == (2, 2, "lease_3")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_worker_that_leaves_loses_its_jobs_immediately_and_polled_ones_stay(
    server: Server, h1: Api, queue: str, protocol: str
) -> None:
    h1.write(queue, 1, 2, 3)
    assert post(h1, queue, "claim")["count"] == 1
    with working(server, queue, protocol=protocol, max=5) as worker:
        assert worker.jobs(2) == [2, 3]
        until(h1, queue, ready=0, in_flight=3)
    until(h1, queue, ready=2, in_flight=1)
    assert post(h1, queue, "ack", 1)["acked"] == 1


def test_expired_leases_go_to_another_worker_without_a_request(server: Server, h1: Api, queue: str) -> None:
    h1.write(queue, 1)
    with working(server, queue, lease_ms=1000) as worker:
        first = worker.next()
        with working(server, queue, node="v", lease_ms=1000) as other:
            second = other.next()
            assert (first.data["deliveries"], second.data["deliveries"]) == (1, 2)
            assert 0 < second.data["deadline"] - first.data["deadline"] < 3000


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_worker_that_hangs_loses_its_jobs_and_its_stream_and_the_queue_loses_nothing(
    server: Server, h1: Api, protocol: str
) -> None:
    queue = fresh_name("work")
    h1.put(queue, type="queue", lease_ms=300, max_deliveries=2, dead_letter=queue + ".dead")
    h1.write(queue, 1, 2, 3, 4, 5)
    with working(server, queue, protocol=protocol, max=2) as worker:
        time.sleep(1.5)
        assert h1.state(queue)["queue"] == {"ready": 5, "in_flight": 0, "dead_lettered": 0}
        assert worker.jobs(2) == [1, 2]
        event = worker.next()
        assert (event.name, event.data["code"], event.data["topic"]) == ("error", 408, queue)
        with pytest.raises(EOFError):
            worker.next()
    assert [job["deliveries"] for job in post(h1, queue, "claim", max=9)["claimed"]] == [2, 2, 1, 1, 1]


def test_a_late_worker_that_extends_its_lease_continues(server: Server, h1: Api, queue: str) -> None:
    h1.write(queue, 1, 2)
    with working(server, queue, lease_ms=600) as worker:
        job = worker.next().data
        until(h1, queue, ready=2, in_flight=0)
        assert post(h1, queue, "ack", 1, lease_ids=[job["lease_id"]])["skipped"] == [1]
        assert worker.jobs(1) == [1]


@pytest.mark.parametrize("query", [{"max": "x", "lease_ms": "x"}, {"max": "0"}])
def test_invalid_numbers_are_the_defaults(server: Server, h1: Api, queue: str, query: dict[str, str]) -> None:
    h1.write(queue, 1, 2)
    with working(server, queue, **query) as worker:
        job = worker.next()
        assert job.data["deadline"] - time.time_ns() // 1_000_000 > 500_000
        assert h1.state(queue)["queue"]["in_flight"] == 1


def test_the_order_of_checks(api: Api, topic: str) -> None:
    path = f"/v0/topics/{topic}/work"
    html = {"Accept": "text/html"}
    assert api.refused("GET", path, status=406, headers=html)["code"] == "not_acceptable"
    assert api.refused("GET", path, status=400)["code"] == "invalid_request"
    assert api.refused("GET", path + "?node=" + "n" * 129, status=400)["code"] == "invalid_request"
    assert api.refused("GET", path + "?node=w", status=404)["code"] == "topic_not_found"
    api.put(topic)
    assert api.refused("GET", path + "?node=w", status=409)["code"] == "not_a_queue"
    assert api.refused("POST", path, {}, status=405)["code"] == "method_not_allowed"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_whose_queue_is_deleted_reports_it_and_ends(
    server: Server, h1: Api, queue: str, protocol: str
) -> None:
    with working(server, queue, protocol=protocol) as worker:
        h1.remove(queue)
        event = worker.next()
        assert (event.name, event.data["code"], event.data["topic"]) == ("error", 409, queue)
        assert event.data["error"]
        with pytest.raises(EOFError):
            worker.next()


def test_too_many_streams_are_refused_until_a_slot_is_released(tmp_path: Any) -> None:
    with serving(tmp_path / "data", TOPICS_MAX_SSE_CONNECTIONS="1") as server:
        api = server.api()
        api.put("q", type="queue")
        with working(server, "q"):
            assert api.refused("GET", "/v0/topics/q/work?node=v", status=429)["code"] == "throttled"
            numbers = api.client.get("/v0/metrics", headers={"Accept": "application/json"}).json()
            assert numbers["sse_connections"] == 1
        deadline = time.monotonic() + 5
        while True:
            with server.api().client.stream("GET", "/v0/topics/q/work?node=v") as response:
                if response.status_code == 200:
                    break
            assert time.monotonic() < deadline


def test_a_key_may_be_in_the_query(tmp_path: Any) -> None:
    keys = "root,both:rw:a.,reader:read"
    with serving(tmp_path / "data", key="root", TOPICS_API_KEYS=keys) as server:
        root = server.api(key="root")
        root.put("a.q", type="queue")
        root.write("a.q", 1)
        anybody = server.api()
        assert anybody.refused("GET", "/v0/topics/a.q/work?node=w", status=401)["code"] == "unauthorized"
        path = "/v0/topics/a.q/work?node=w&token="
        assert anybody.refused("GET", path + "reader", status=403)["code"] == "forbidden"
        assert anybody.refused("GET", path + "wrong", status=401)["code"] == "unauthorized"
        with working(server, "a.q", token="both") as worker:
            assert worker.jobs(1) == [1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_stops_reports_it_and_keeps_the_jobs(tmp_path: Any, protocol: str) -> None:
    with serving(tmp_path / "data") as server:
        api = server.api()
        api.put("q", type="queue", leases_durable=True, lease_ms=600_000, durable=True)
        api.write("q", 1)
        with working(server, "q", protocol=protocol) as worker:
            assert worker.jobs(1) == [1]
            server.process.send_signal(signal.SIGTERM)
            event = worker.next()
            assert (event.name, event.data["code"], event.data["topic"]) == (
                "error",
                "server_shutting_down",
                "q",
            )
            with pytest.raises(EOFError):
                worker.next()
        assert server.stop() == 0
    with serving(tmp_path / "data") as server:
        assert server.api().state("q")["queue"]["ready"] == 1


def test_fifty_workers_do_every_job_once(server: Server, h1: Api) -> None:
    """Polls and streams together; leases last, so no job may be lost or repeated."""
    topic = fresh_name("work")
    h1.put(topic, type="queue", lease_ms=600_000)
    total = 2000
    for start in range(0, total, 500):
        h1.write(topic, *range(start, start + 500))
    done: list[int] = []

    def poll(number: int) -> None:
        api, node = server.api(), f"poll-{number}"
        while jobs := post(api, topic, "claim", node=node, max=7)["claimed"]:
            seqs = [job["$seq"] for job in jobs]
            ids = [job["lease_id"] for job in jobs]
            assert post(api, topic, "ack", *seqs, node=node, lease_ids=ids)["acked"] == len(seqs)
            done.extend(seqs)

    def stream(number: int) -> None:
        api, node = server.api(), f"stream-{number}"
        with working(server, topic, node=node, max=5) as worker, contextlib.suppress(EOFError):
            while (event := worker.next()).name == "job":
                seq = event.data["$seq"]
                assert post(api, topic, "ack", seq, node=node)["acked"] == 1
                done.append(seq)

    streams = [threading.Thread(target=stream, args=[number]) for number in range(10)]
    polls = [threading.Thread(target=poll, args=[number]) for number in range(40)]
    for thread in [*streams, *polls]:
        thread.start()
    for thread in polls:
        thread.join()
    until(h1, topic, ready=0, in_flight=0)
    h1.remove(topic)
    for thread in streams:
        thread.join()
    assert sorted(done) == list(range(1, total + 1))
