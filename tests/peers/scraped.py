"""Something to scrape: every kind of metric in the text format, over a port of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["METADATA", "Target", "target"]

METADATA = {
    "work_total": [{"type": "counter", "help": 'What was done. With "quotes" and a \\ in it.', "unit": ""}],
    "work_now": [{"type": "gauge", "help": "What is being done.", "unit": ""}],
    "work_seconds": [{"type": "histogram", "help": "How long it took.", "unit": ""}],
    "work_bytes": [{"type": "summary", "help": "How large it was.", "unit": ""}],
    "work_plain": [{"type": "unknown", "help": "Of no type.", "unit": ""}],
}
"""What Prometheus knows of these metrics."""


class Target:
    """Numbers that change with each scrape, in a way that is known."""

    def __init__(self) -> None:
        self.scrapes = 0
        self.with_second_lane = True

    def text(self) -> str:
        self.scrapes += 1
        n = self.scrapes
        lanes = ["a", 'b\\n\\"ü\\\\'] if self.with_second_lane else ["a"]
        counts = [n // 3, n // 2, n]
        return "".join(
            [
                '# HELP work_total What was done. With "quotes" and a \\\\ in it.\n',
                "# TYPE work_total counter\n",
                *(f'work_total{{lane="{lane}"}} {n % 10 * 2.5}\n' for lane in lanes),
                "# HELP work_now What is being done.\n# TYPE work_now gauge\n",
                f'work_now{{is="number"}} {-n / 7}\nwork_now{{is="nan"}} NaN\nwork_now{{is="inf"}} +Inf\n',
                f'work_now{{is="now and then"}} {n}\n' if n % 4 else "",
                "# HELP work_seconds How long it took.\n# TYPE work_seconds histogram\n",
                f'work_seconds_bucket{{le="0.1"}} {counts[0]}\nwork_seconds_bucket{{le="1"}} {counts[1]}\n',
                f'work_seconds_bucket{{le="+Inf"}} {counts[2]}\n',
                f"work_seconds_sum {n * 0.3}\nwork_seconds_count {n}\n",
                "# HELP work_bytes How large it was.\n# TYPE work_bytes summary\n",
                f'work_bytes{{quantile="0.5"}} {n * 1e9}\nwork_bytes_sum {n * 1e21}\nwork_bytes_count {n}\n',
                "# HELP work_plain Of no type.\n# TYPE work_plain untyped\nwork_plain 1e-300\n",
            ]
        )


@contextmanager
def target(numbers: Target) -> Iterator[str]:
    """Its `host:port` while it is there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = numbers.text().encode()
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
