"""A feed in the browser: a topic as a web page that updates live.

    penstock topics serve &
    python examples/live_feed/feed.py http://127.0.0.1:4000 news --port 8000
    echo '{"text": "hello"}' | penstock topics write news        # and look at http://127.0.0.1:8000

Browsers speak server-sent events, and so does the topics server. But the server sends no CORS headers, and
its keys do not belong in a page. This gateway therefore serves the page, opens a watch for each browser, and
forwards the stream. Every event has an id. A browser whose connection broke sends the last id back, and the
feed continues after it. For a server with keys, set TOPICS_API_KEY.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

PAGE = Path(__file__).with_name("page.html")
HEARTBEAT_MS = 5_000


class Gateway(ThreadingHTTPServer):
    """Serve the page and one feed per browser."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], url: str, topic: str) -> None:
        super().__init__(address, Visitor)
        self.url = url
        self.topic = topic


class Visitor(BaseHTTPRequestHandler):
    """One request of a browser."""

    server: Gateway

    def do_GET(self) -> None:
        if self.path == "/":
            self._page()
        elif self.path == "/feed":
            self._feed()
        else:
            self.send_error(404)

    def _page(self) -> None:
        body = PAGE.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _feed(self) -> None:
        key = os.environ.get("TOPICS_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(10, read=30)
        with httpx.Client(base_url=self.server.url, headers=headers, timeout=timeout) as client:
            wanted = {
                "topics": {self.server.topic: {"from_seq": self._position()}},
                "heartbeat_ms": HEARTBEAT_MS,
            }
            try:
                session = client.post("/v0/watch", json=wanted)
            except httpx.TransportError as error:
                self.send_error(502, "the topics server does not respond", str(error))
                return
            if session.is_error:
                self.send_error(502, session.json()["error"]["message"])
                return
            with client.stream("GET", session.json()["stream_url"]) as stream:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                try:
                    for piece in stream.iter_raw():
                        self.wfile.write(piece)
                        self.wfile.flush()
                except (ConnectionError, httpx.TransportError):
                    return  # one of the two is gone; the browser reconnects

    def _position(self) -> int:
        """Return the browser's position: the id of an event maps topics to sequences."""
        given = self.headers.get("Last-Event-ID", "")
        try:
            text = base64.urlsafe_b64decode(given + "=" * (-len(given) % 4))
            return int(json.loads(text)[self.server.topic])
        except (ValueError, KeyError, TypeError):
            return 0

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: browsers connect and disconnect all the time."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A topic as a web page that updates live.")
    parser.add_argument("url", help="where the topics server is")
    parser.add_argument("topic")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    with Gateway(("127.0.0.1", options.port), options.url, options.topic) as gateway:
        print(f"http://127.0.0.1:{gateway.server_address[1]}", flush=True)  # noqa: T201
        gateway.serve_forever()


if __name__ == "__main__":
    main()
