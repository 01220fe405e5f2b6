"""§1: one port, two protocols, and refusals by the transport."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import httpx
import pytest
from tests.contract.raw_http import JSON_HEADERS, connect, request_bytes
from tests.contract.topics_server import Api, Server, check_answer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ONE_RECORD = b'{"records":[{"data":1}]}'


def test_both_protocols_are_served_on_the_same_port(server: Server, topic: str) -> None:
    old, new = server.api("h1"), server.api("h2")
    for api, version in ((old, "HTTP/1.1"), (new, "HTTP/2")):
        health = api.client.get("/v0/health")
        assert (health.status_code, health.http_version) == (200, version)
    assert old.write(topic, "by h1")["first_seq"] == 1
    assert new.write(topic, "by h2")["first_seq"] == 2
    assert old.data_of(topic) == new.data_of(topic) == ["by h1", "by h2"]


def test_a_connection_is_kept_for_the_next_request(server: Server) -> None:
    with connect(server) as raw:
        for _ in range(5):
            raw.send(request_bytes("GET", "/v0/health"))
            reply = raw.reply()
            assert reply.status == 200
            assert "connection" not in reply.headers


def test_connection_close_closes_the_connection(server: Server) -> None:
    with connect(server) as raw:
        raw.send(request_bytes("GET", "/v0/health", headers={"Connection": "close"}))
        assert raw.reply().headers["connection"] == "close"
        assert raw.is_closed_by_the_server()


def test_the_protocol_is_detected_from_single_bytes(server: Server) -> None:
    with connect(server) as raw:
        for byte in request_bytes("GET", "/v0/health"):
            raw.send(bytes([byte]))
        assert raw.reply().status == 200
    with connect(server) as raw:
        for byte in PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00":
            raw.send(bytes([byte]))
        head = raw.peer.recv(9, 0)
        assert head[3] == 4, "the server's SETTINGS frame comes first"


def test_a_method_that_begins_like_the_preface_is_still_http_1(server: Server) -> None:
    with connect(server) as raw:
        raw.send(b"P")
        raw.send(b"R")
        raw.send(b"OPFIND /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.reply().error()["code"] == "method_not_allowed"


def test_http_2_offers_the_windows_and_the_streams_of_the_contract(server: Server) -> None:
    with connect(server) as raw:
        raw.send(PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        seen = b""
        while b"\x00\x00\x04\x08" not in seen:
            seen += raw.peer.recv(4096)
        length = int.from_bytes(seen[:3], "big")
        settings = seen[9 : 9 + length]
        offered = {
            int.from_bytes(settings[at : at + 2], "big"): int.from_bytes(settings[at + 2 : at + 6], "big")
            for at in range(0, length, 6)
        }
        assert offered[3] == 1024, "concurrent streams"
        assert offered[4] == 1024**2, "the window of a stream"
        at = seen.index(b"\x00\x00\x04\x08")
        increment = int.from_bytes(seen[at + 9 : at + 13], "big")
        assert 65_535 + increment == 4 * 1024**2, "the window of the connection"


def test_pipelined_requests_are_answered_in_their_order(server: Server, topic: str) -> None:
    writes = [
        request_bytes("POST", f"/v0/topics/{topic}", b'{"records":[{"data":%d}]}' % number, JSON_HEADERS)
        for number in range(20)
    ]
    with connect(server) as raw:
        raw.send(b"".join(writes) + request_bytes("GET", f"/v0/topics/{topic}"))
        assert [raw.reply().json()["first_seq"] for _ in range(20)] == list(range(1, 21))
        assert raw.reply().json()["count"] == 20


def test_a_chunked_body_is_a_body(server: Server, topic: str) -> None:
    head = f"POST /v0/topics/{topic} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(server) as raw:
        raw.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(ONE_RECORD), 7):
            piece = ONE_RECORD[start : start + 7]
            raw.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        raw.send(b"0\r\n\r\n")
        assert raw.reply().json()["seqs"] == [1]


def test_a_client_that_expects_100_continue_receives_it(server: Server, topic: str) -> None:
    head = {**JSON_HEADERS, "Expect": "100-continue", "Content-Length": str(len(ONE_RECORD))}
    with connect(server) as raw:
        raw.send(request_bytes("POST", f"/v0/topics/{topic}", headers=head))
        assert raw.status_line() == 100
        raw.skip_headers()
        raw.send(ONE_RECORD)
        assert raw.reply().json()["seqs"] == [1]


@pytest.mark.parametrize(
    "garbage",
    [
        b"this is not http\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nHost test\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\nContent-Length: nine\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nab",
        b"POST /v0/topics/x HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["no request line", "no colon", "no number", "two lengths", "length and chunks", "no chunk size"],
)
def test_bytes_that_are_not_http_get_400_and_the_connection_is_closed(server: Server, garbage: bytes) -> None:
    with connect(server) as raw:
        raw.send(garbage)
        reply = raw.reply()
        assert (reply.status, reply.error()["code"]) == (400, "invalid_request")
        assert raw.is_closed_by_the_server()


def test_a_head_without_end_is_refused_before_it_fills_memory(server: Server) -> None:
    with connect(server) as raw:
        raw.send(b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n")
        filler = b"X-Filler: " + b"x" * 1000 + b"\r\n"
        try:
            for _ in range(2000):
                raw.send(filler)
        except (BrokenPipeError, ConnectionResetError):
            pass
        else:
            reply = raw.reply()
            assert (reply.status, reply.error()["code"]) == (400, "invalid_request")


def test_a_target_may_be_a_whole_address_of_the_server(server: Server) -> None:
    with connect(server) as raw:
        raw.send(request_bytes("GET", "http://localhost/v0/health?x=1"))
        assert raw.reply().json()["status"] == "ok"
        raw.send(request_bytes("GET", "http://elsewhere.example/v0/health?x=1"))
        assert raw.reply().status == 403


def test_a_client_of_http_1_0_gets_an_answer_and_its_connection_closed(server: Server) -> None:
    with connect(server) as raw:
        raw.send(b"GET /v0/health HTTP/1.0\r\n\r\n")
        assert raw.reply().json()["status"] == "ok"
        assert raw.is_closed_by_the_server()


def test_responses_are_not_compressed_unless_requested(server: Server, topic: str) -> None:
    server.api().write(topic, *range(1000))
    with connect(server) as raw:
        raw.send(request_bytes("POST", f"/v0/topics/{topic}/diff", b'{"limit":1000}', JSON_HEADERS))
        reply = raw.reply()
        assert "content-encoding" not in reply.headers
        assert len(reply.json()["records"]) == 1000


def test_an_upgrade_request_is_not_granted(server: Server) -> None:
    wish = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    with connect(server) as raw:
        raw.send(request_bytes("GET", "/v0/health", headers=wish))
        assert raw.reply().json()["status"] == "ok"


@pytest.mark.parametrize(
    "frame",
    [
        b"\x00\x00\x05\x04\x00\x00\x00\x00\x00abcde",
        b"\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00abcd",
    ],
    ids=["settings of an odd length", "data on no stream"],
)
def test_a_broken_http_2_frame_ends_that_connection_and_no_other(
    server: Server, api: Api, frame: bytes
) -> None:
    with connect(server) as raw:
        raw.send(PREFACE + frame)
        seen = b""
        while piece := raw.peer.recv(4096):
            seen += piece
        assert b"\x00\x00\x08\x07" in seen, "a GOAWAY frame says that it is over"
    assert api.client.get("/v0/health").status_code == 200


def test_an_oversized_frame_is_refused_before_it_is_complete(server: Server) -> None:
    with connect(server) as raw:
        raw.send(PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        raw.send(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01")
        while raw.peer.recv(4096):
            pass


def test_a_head_of_many_http_2_frames_is_bounded(server: Server) -> None:
    with connect(server) as raw:
        raw.send(PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        raw.send(b"\x00\x40\x00\x01\x00\x00\x00\x00\x01" + bytes(0x4000))
        for _ in range(4):
            raw.send(b"\x00\x40\x00\x09\x00\x00\x00\x00\x01" + bytes(0x4000))
        with contextlib.suppress(ConnectionResetError):
            while raw.peer.recv(4096):
                pass


async def test_many_requests_share_one_http_2_connection(server: Server, topic: str) -> None:
    limits = httpx.Limits(max_connections=1)
    options = {"http1": False, "http2": True, "timeout": 40, "trust_env": False, "limits": limits}
    async with httpx.AsyncClient(base_url=server.url, **options) as client:
        await client.put(f"/v0/topics/{topic}")

        async def write(number: int) -> int:
            answer = await client.post(f"/v0/topics/{topic}", json={"records": [{"data": number}]})
            return int(answer.json()["first_seq"])

        seqs = await asyncio.gather(*(write(number) for number in range(100)))
    assert sorted(seqs) == list(range(1, 101))


def test_a_response_far_larger_than_a_window_arrives_completely(api: Api, topic: str) -> None:
    text = "x" * 900_000
    for _ in range(6):
        api.write(topic, text)
    assert api.data_of(topic, max_batch_bytes=8 * 1024**2) == [text] * 6


def test_a_slow_client_gets_its_answer_while_others_are_served(server: Server, h1: Api, topic: str) -> None:
    text = "x" * 900_000
    for _ in range(7):
        h1.write(topic, text)
    body = json.dumps({"max_batch_bytes": 8 * 1024**2}).encode()
    with connect(server) as raw:
        raw.send(request_bytes("POST", f"/v0/topics/{topic}/diff", body, JSON_HEADERS))
        began = time.monotonic()
        assert h1.client.get("/v0/health").status_code == 200
        assert time.monotonic() - began < 5
        assert len(raw.reply().json()["records"]) == 7


def test_there_is_no_cross_origin_sharing(api: Api, topic: str) -> None:
    for path in ("/v0/topics", f"/v0/topics/{topic}", "/v0/health", "/v0/nothing"):
        plain = api.client.options(path, headers={"X": "y"})
        assert (plain.status_code, plain.json()["error"]["code"]) == (405, "method_not_allowed")
        foreign = api.client.options(path, headers={"Origin": "http://other", "X": "y"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "forbidden")
        for response in (plain, foreign):
            check_answer(response)
            assert not [name for name in response.headers if name.startswith("access-control")]
    got = api.client.get("/v0/health", headers={"Origin": "http://other"})
    assert got.status_code == 403
    assert not [name for name in got.headers if name.startswith("access-control")]
