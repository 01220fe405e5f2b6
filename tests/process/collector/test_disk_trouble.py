"""A collector whose disk fails writes: clients are asked to retry, and the probe reports it."""

from __future__ import annotations

import resource
from pathlib import Path

import httpx
from tests.collector_process import CollectorProcess, free_port
from tests.process.collector.test_exactly_once import TEXT, request


def test_ready_is_503_while_no_write_succeeds_and_200_again_after_that(tmp_path: Path) -> None:
    port = free_port()
    text = f'{TEXT}telemetry: {{metrics_addr: "127.0.0.1:{port}"}}\n'
    headers = {"content-type": "application/x-protobuf"}
    with CollectorProcess(tmp_path, text) as collector, httpx.Client(timeout=30) as client:

        def export(name: str) -> httpx.Response:
            url = f"http://127.0.0.1:{collector.http_port}/v1/traces"
            return client.post(url, content=request(name), headers=headers)

        def status(path: str) -> int:
            return client.get(f"http://127.0.0.1:{port}{path}").status_code

        assert (export("a").status_code, status("/ready")) == (200, 200)
        limits = resource.prlimit(collector.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(collector.pid, resource.RLIMIT_FSIZE, (1, limits[1]))
        try:
            refused = export("b")
            assert refused.status_code == 503
            assert str(tmp_path).encode() not in refused.content
            assert (status("/ready"), status("/health")) == (503, 200)
        finally:
            resource.prlimit(collector.pid, resource.RLIMIT_FSIZE, limits)
        assert (export("b").status_code, status("/ready")) == (200, 200)
