"""The blocking client: the same calls, over a real socket."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.unit.topics.client.fake_server import WRITTEN

from penstock.topics import errors
from penstock.topics.client import Client as AsyncClient
from penstock.topics.client import Unreachable
from penstock.topics.client.sync import Client


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.opened += 1  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.busy.set()  # type: ignore[attr-defined]
        self.server.gate.wait(30)  # type: ignore[attr-defined]
        if not self.path.endswith("/diff"):
            self._answer(200, WRITTEN)
            return
        at = asked["from_seq"]
        if at == 3:
            self._answer(404, {"error": {"code": "topic_not_found", "message": "gone"}})
            return
        record = {"$seq": at + 1, "$ts": 1, "data": at}
        numbers = {"next_from_seq": at + 1, "head_seq": 9, "earliest_seq": 1}
        self._answer(200, {"topic": "t", "records": [record], "tombstone": None} | numbers)

    def do_GET(self) -> None:
        names = ["a", "b"] if "cursor" not in self.path else ["c"]
        numbers = {"head_seq": 1, "earliest_seq": 1, "count": 1, "bytes": 2, "effective_priority": 0}
        topics = [{"topic": name, "durable": True} | numbers for name in names]
        self._answer(200, {"topics": topics} | ({"next_cursor": "x"} if len(names) == 2 else {}))

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    opened = 0

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.gate = threading.Event()
        self.busy = threading.Event()
        self.gate.set()


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


@pytest.fixture
def client(server: _Server) -> Iterator[Client]:
    with Client(f"http://127.0.0.1:{server.server_port}") as made:
        yield made


def test_calls_share_one_connection(client: Client, server: _Server) -> None:
    assert [client.write("t", [number]).last_seq for number in range(5)] == [1] * 5
    assert server.opened == 1


def test_threads_share_at_most_the_allowed_connections(server: _Server) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    with Client(url, connections_max=3) as client, ThreadPoolExecutor(8) as threads:
        written = [threads.submit(client.write, "t", [number]) for number in range(40)]
        assert [done.result().last_seq for done in written] == [1] * 40
    assert 1 <= server.opened <= 3


def test_a_call_that_gets_no_connection_in_time_was_not_sent(server: _Server) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    with Client(url, connections_max=1, timeout="300ms", retry_deadline=0) as client:
        server.gate.clear()
        with ThreadPoolExecutor(1) as threads:
            polling = threads.submit(client.diff, "t", wait_ms=30_000)  # longer than a write by its wait
            server.busy.wait(10)
            with pytest.raises(Unreachable, match="connections are busy"):
                client.write("t", [2])
            server.gate.set()
            assert polling.result().next_from_seq == 1


def test_following_ends_with_the_error_that_ended_it(client: Client) -> None:
    seen: list[int] = []
    try:
        for page in client.follow("t"):
            seen += [record.seq for record in page.records()]
    except errors.TopicNotFound:
        seen.append(-1)
    assert seen == [1, 2, 3, -1]


def test_following_may_be_stopped_at_any_page(client: Client) -> None:
    for page in client.follow("t"):
        assert page.next_from_seq == 1
        break


def test_a_list_covers_every_page(client: Client) -> None:
    assert [found.topic for found in client.topics()] == ["a", "b", "c"]


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        named = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in named if name[0] != "_"}

    assert calls(Client) == calls(AsyncClient)
    assert str(inspect.signature(Client)) == str(inspect.signature(AsyncClient))
