"""A collector as a real process, and an OTLP server at the far end that remembers what it got."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

import penstock
from penstock.collector.receiver_grpc import METHODS
from penstock.otlp.messages import messages_of
from penstock.otlp.schema import Signal

FILE = """
nodes:
  in:
    kind: receiver
    plugin_urn: urn:otel:otlp:receiver
    out_ports: {out_port: {destinations: [keep]}}
    config: {listening_addr: "127.0.0.1:{{grpc_port}}", http_listening_addr: "127.0.0.1:{{http_port}}"}
  keep:
    kind: processor
    plugin_urn: urn:otap:processor:persistence
    out_ports: {out_port: {destinations: [out]}}
    config:
      path: "{{dir}}/quiver"
      otlp_handling: "{{handling}}"
      segment: {max_open_duration: 200ms}
      wal: {flush_interval: 2ms}
      retry: {initial: 100ms, max: 500ms}
      retention: {min_free: 0}
  out:
    kind: exporter
    plugin_urn: urn:otel:otlp:exporter
    config:
      grpc_endpoint: "http://127.0.0.1:{{far_port}}"
      timeout: 5s
      probe: {initial: 100ms, max: 300ms}
dead_letters: "{{dir}}/dead"
drain_timeout: 10s
"""

_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parent.parent)}
"""A process runs the source that the test itself has."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class CollectorProcess:
    """`penstock collector run`, on ports that stay the same over restarts."""

    def __init__(self, directory: Path, text: str = FILE, **variables: object) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        self._file = directory / "collector.yaml"
        self._file.write_text(text)
        self._log = directory / "collector.log"
        self._variables: Mapping[str, object] = {
            "dir": directory,
            "grpc_port": self.grpc_port,
            "http_port": self.http_port,
            "handling": "arrow",
            **variables,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> CollectorProcess:
        command = [sys.executable, "-m", "penstock.cli", "collector", "run", str(self._file), "--json"]
        for name, value in self._variables.items():
            command += ["--set", f"{name}={value}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=_ENVIRONMENT, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log
        assert json.loads(line)["event"] == "ready"
        return self

    def kill(self) -> None:
        """As a power cut would, as far as the process is concerned."""
        assert self._process is not None
        self._process.kill()
        self._reap()

    def stop(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._reap()

    def _reap(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        code = self._process.wait(30)
        self._process = None
        return code

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> CollectorProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()


class FarEnd(grpc.GenericRpcHandler):
    """An OTLP server in threads of this process. `answer` may abort a call before it is remembered."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.answer: Callable[[bytes, grpc.ServicerContext], None] | None = None
        self.requests: list[tuple[Signal, bytes]] = []
        self.at_s: list[float] = []
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def start(self) -> FarEnd:
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
        self._server.add_generic_rpc_handlers((self,))
        assert self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        found = METHODS[handler_call_details.method]

        def export(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.at_s.append(time.monotonic())
            if self.answer is not None:
                self.answer(request, context)
            with self._lock:
                self.requests.append((found, request))
            return b""

        return grpc.unary_unary_rpc_method_handler(export)

    def names(self, wanted: Signal) -> Counter[str]:
        """How often each span, log body or metric has come."""
        with self._lock:
            requests = [data for found, data in self.requests if found is wanted]
        return Counter(name for data in requests for name in names_in(data, wanted))

    def wait_for(self, wanted: Signal, names: set[str], timeout_s: float = 30) -> Counter[str]:
        deadline = time.monotonic() + timeout_s
        while not names <= (seen := self.names(wanted)).keys():
            assert time.monotonic() < deadline, f"{len(names - seen.keys())} of {len(names)} never came"
            time.sleep(0.05)
        return seen

    def __enter__(self) -> FarEnd:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def names_in(data: bytes, wanted: Signal) -> list[str]:
    request = messages_of(wanted).request.FromString(data)
    if wanted is Signal.TRACES:
        return [s.name for r in request.resource_spans for p in r.scope_spans for s in p.spans]
    if wanted is Signal.METRICS:
        return [m.name for r in request.resource_metrics for p in r.scope_metrics for m in p.metrics]
    return [
        record.body.string_value
        for r in request.resource_logs
        for p in r.scope_logs
        for record in p.log_records
    ]
