"""§10.4: a server that is stopped finishes the requests in progress."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.contract.raw_http import JSON_HEADERS, RawConnection, connect, request_bytes
from tests.contract.topics_server import PROTOCOLS, Server, serving

BODY = b'{"records":[{"data":"in flight"}]}'
HEAD = {**JSON_HEADERS, "Content-Length": str(len(BODY))}


def wait_until_it_refuses_connections(server: Server) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(server.host_and_port):
            time.sleep(0.005)
            continue
        return
    raise AssertionError("it still accepts connections")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_with_exit_code_0_and_an_idle_client_does_not_delay_it(
    tmp_path: Path, number: int
) -> None:
    with serving(tmp_path / "data") as server:
        for protocol in PROTOCOLS:
            server.api(protocol).put(f"x-{protocol}")
        with connect(server):
            began = time.monotonic()
            assert server.stop(number) == 0
            assert time.monotonic() - began < 8
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stop_ends_long_polls_with_the_available_records(tmp_path: Path, protocol: str) -> None:
    answers: list[httpx.Response] = []
    with serving(tmp_path / "data") as server:
        api = server.api(protocol)
        api.write("x", 1)
        body = {"from_seq": 1, "wait_ms": 30_000}

        def poll() -> None:
            answers.append(api.client.post("/v0/topics/x/diff", json=body))

        polling = threading.Thread(target=poll)
        polling.start()
        watcher = server.api()
        while watcher.state("x", touch="false")["last_read_ts"] is None:
            time.sleep(0.005)
        server.process.terminate()
        polling.join(timeout=20)
        assert not polling.is_alive()
        assert server.stop() == 0
    (answer,) = answers
    assert answer.status_code == 200
    assert (answer.json()["records"], answer.json()["caught_up"]) == ([], True)


def test_a_request_that_arrives_while_draining_is_refused_and_not_applied(tmp_path: Path) -> None:
    """The head arrives before the stop, so the connection stays open; the body arrives after it."""
    data = tmp_path / "data"
    with serving(data) as server:
        server.api().write("x", 1)
        with connect(server) as raw:
            raw.send(request_bytes("POST", "/v0/topics/x", headers=HEAD))
            time.sleep(0.1)
            server.process.terminate()
            wait_until_it_refuses_connections(server)
            raw.send(BODY)
            reply = raw.reply()
            assert reply.status == 503
            assert reply.error()["code"] == "shutting_down"
            assert raw.is_closed_by_the_server()
        assert server.stop() == 0
    with serving(data) as server:
        assert server.api().state("x")["count"] == 1


def test_a_write_in_progress_is_answered_and_kept(tmp_path: Path) -> None:
    """All writes acknowledged around the stop survive, and no others."""
    data = tmp_path / "data"
    acked: list[int] = []
    with serving(data) as server:
        server.api().put("x", durability="fsync")

        def write() -> None:
            with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client:
                while True:
                    try:
                        answer = client.post("/v0/topics/x", json={"records": [{"data": 1}]})
                    except httpx.TransportError:
                        return
                    if answer.status_code != 200:
                        assert answer.json()["error"]["code"] == "shutting_down"
                        return
                    acked.append(answer.json()["first_seq"])

        writers = [threading.Thread(target=write) for _ in range(4)]
        for writer in writers:
            writer.start()
        while len(acked) < 40:
            time.sleep(0.005)
        assert server.stop() == 0
        for writer in writers:
            writer.join()
    with serving(data) as server:
        kept: list[int] = []
        while page := server.api().seqs_of("x", from_seq=kept[-1] if kept else 0, limit=1000):
            kept += page
        assert set(acked) <= set(kept)
        assert len(kept) - len(acked) <= 4, "at most one answer per writer was lost on its way"


def test_a_client_that_never_finishes_is_disconnected_after_ten_seconds(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        raw = RawConnection(socket.create_connection(server.host_and_port, timeout=20))
        try:
            raw.send(request_bytes("POST", "/v0/topics/x", headers=HEAD))
            time.sleep(0.1)
            began = time.monotonic()
            assert server.stop() == 0
            assert 8 < time.monotonic() - began < 20
        finally:
            raw.close()
