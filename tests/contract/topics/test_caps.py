"""Limits of the server: bodies, topics, bytes, requests in progress; and probes that need a key."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from tests.contract.raw_http import JSON_HEADERS, connect, request_bytes
from tests.contract.topics_server import PROTOCOLS, Api, Server, serving

KEY = "k"
BODY_MAX = 2000
AUTHORIZED = {**JSON_HEADERS, "Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        tmp_path_factory.mktemp("capped") / "data",
        key=KEY,
        TOPICS_API_KEYS=f"{KEY},other",
        TOPICS_PROBE_AUTH="true",
        TOPICS_MAX_BODY_BYTES=str(BODY_MAX),
        TOPICS_MAX_TOPICS="3",
        TOPICS_MAX_TOTAL_BYTES="5000",
        TOPICS_MAX_INFLIGHT_PER_KEY="2",
    ) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def api(request: pytest.FixtureRequest, capped: Server) -> Iterator[Api]:
    """Open a client, and remove all topics at the end: the caps count everything."""
    opened = capped.api(request.param, key=KEY)
    yield opened
    for one in opened.ask("GET", "/v0/topics")["topics"]:
        opened.remove(one["topic"])


def body_of(size: int) -> bytes:
    frame = b'{"records":[{"data":"%b"}]}'
    return frame % (b"x" * (size - len(frame % b"")))


# --- bodies ------------------------------------------------------------------------------------------------


def test_a_body_of_exactly_the_cap_is_accepted_and_one_byte_more_is_not(api: Api, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    api.ask("POST", path, status=201, content=body_of(BODY_MAX), headers=JSON_HEADERS)
    error = api.refused("POST", path, status=413, content=body_of(BODY_MAX + 1), headers=JSON_HEADERS)
    assert error["code"] == "payload_too_large"
    assert api.state(topic)["count"] == 1


@pytest.mark.parametrize("size", [BODY_MAX + 1, 40_000])
def test_a_body_above_the_cap_is_refused_before_it_is_parsed(api: Api, topic: str, size: int) -> None:
    path = f"/v0/topics/{topic}"
    error = api.refused("POST", path, status=413, content=b"{" * size, headers=JSON_HEADERS)
    assert error["code"] == "payload_too_large"


def test_a_body_without_a_length_is_cut_off_at_the_cap(api: Api, topic: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(5):
            yield b"x" * 1000

    error = api.refused("POST", f"/v0/topics/{topic}", status=413, content=pieces(), headers=JSON_HEADERS)
    assert error["code"] == "payload_too_large"


def test_an_announced_body_above_the_cap_is_refused_without_waiting_for_it(capped: Server) -> None:
    for size in (BODY_MAX + 1, 10**9):
        head = {**AUTHORIZED, "Content-Length": str(size)}
        with connect(capped) as raw:
            raw.send(request_bytes("POST", "/v0/topics/x", headers=head))
            reply = raw.reply()
            assert (reply.status, reply.error()["code"]) == (413, "payload_too_large")


def test_a_client_that_expects_100_continue_is_refused_instead(capped: Server) -> None:
    head = {**AUTHORIZED, "Content-Length": str(BODY_MAX + 1), "Expect": "100-continue"}
    with connect(capped) as raw:
        raw.send(request_bytes("POST", "/v0/topics/x", headers=head))
        assert raw.status_line() == 413
    head = {**JSON_HEADERS, "Content-Length": "100", "Expect": "100-continue"}
    with connect(capped) as raw:
        raw.send(request_bytes("POST", "/v0/topics/x", headers=head))
        assert raw.status_line() == 401


def test_a_client_that_is_still_sending_can_read_the_refusal(capped: Server) -> None:
    with connect(capped) as raw:
        raw.send(request_bytes("POST", "/v0/topics/x", b"x" * 3_000_000, AUTHORIZED))
        assert raw.reply().error()["code"] == "payload_too_large"


# --- topics and bytes --------------------------------------------------------------------------------------


def test_new_topics_are_throttled_at_their_cap_and_existing_ones_are_not(api: Api, topic: str) -> None:
    for number in range(3):
        api.put(f"{topic}.{number}")
    for error in (
        api.refused("PUT", f"/v0/topics/{topic}", {}, status=429),
        api.refused("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]}, status=429),
    ):
        assert (error["code"], error["detail"]) == ("throttled", {"limit": "max_topics", "max": 3})
    assert api.put(f"{topic}.0", ttl_ms=60_000, status=200)["config"]["ttl_ms"] == 60_000
    api.write(f"{topic}.0", 1)
    api.remove(f"{topic}.2")
    assert api.put(topic)["created"] is True


def test_writes_are_throttled_at_the_cap_of_all_bytes(api: Api, topic: str) -> None:
    text = "x" * 1248
    for number in range(4):
        api.write(f"{topic}.{number % 2}", text)
    assert sum(one["bytes"] for one in api.ask("GET", "/v0/topics")["topics"]) == 5000
    error = api.write(f"{topic}.0", 1, status=429)["error"]
    assert (error["code"], error["detail"]) == ("throttled", {"limit": "max_total_bytes", "max": 5000})
    assert api.state(f"{topic}.0")["head_seq"] == 2
    api.delete(f"{topic}.0", before_seq=2)
    assert api.write(f"{topic}.0", text)["seqs"] == [3]


def test_a_full_topic_is_reported_before_the_byte_cap(api: Api, topic: str) -> None:
    api.put(topic, cap_bytes=10, discard="reject")
    for _ in range(4):
        api.write(f"{topic}.0", "x" * 1240)
    assert api.write(topic, "x" * 100, status=400)["error"]["code"] == "record_too_large"
    api.write(topic, 1234567890)
    assert api.write(topic, 12, status=422)["error"]["code"] == "topic_full"


# --- requests in progress ----------------------------------------------------------------------------------


def test_requests_in_progress_are_limited_per_key(capped: Server, api: Api, topic: str) -> None:
    api.put(topic)
    other = capped.api(key="other")
    polls = [threading.Thread(target=poll_once, args=(capped, topic)) for _ in range(2)]
    for poll in polls:
        poll.start()
    deadline = time.monotonic() + 10
    while (response := api.client.get("/v0/topics")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert error["code"] == "throttled"
    assert "detail" not in error
    assert other.write(topic, 1)["seqs"] == [1], "another key has requests of its own"
    for poll in polls:
        poll.join()
    assert api.state(topic)["count"] == 1, "the slots are free again"


def poll_once(server: Server, topic: str) -> None:
    with connect(server) as raw:
        raw.send(request_bytes("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":15000}', AUTHORIZED))
        assert raw.reply().status == 200


def test_the_slot_of_a_client_that_leaves_is_released(capped: Server, api: Api, topic: str) -> None:
    api.put(topic)
    for _ in range(5):
        with connect(capped) as raw:
            raw.send(request_bytes("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":30000}', AUTHORIZED))
            time.sleep(0.02)
    deadline = time.monotonic() + 10
    while api.client.get("/v0/topics").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- probes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v0/health", "/healthz", "/v0/ready", "/readyz"])
def test_probes_can_require_a_key_of_any_scope(capped: Server, api: Api, path: str) -> None:
    assert api.client.get(path).status_code == 200
    assert capped.api().refused("GET", path, status=401)["code"] == "unauthorized"
