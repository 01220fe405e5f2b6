"""Trace the five main operations and print how many functions and files of Penstock each passes through.

    python tools/call_paths.py                 # all five, as the table of ARCHITECTURE.md
    python tools/call_paths.py otlp --list     # one of them, with its functions in the order of first calls

Every operation runs twice: once to warm up, once recorded, in this process and in Spark's Python workers.
A function counts once however often it is called. Two files that call each other count as a pair both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

import penstock

Address: TypeAlias = tuple[str, int]
ROOT: Final = str(Path(penstock.__file__).parent) + os.sep
_REST_S: Final = 0.5
"""How long background work of the warm-up is given to end."""
_SETTLED_S: Final = 4.0
_DEADLINE_S: Final = 180.0
_NO_FUNCTIONS: Final = ("<module>", "<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


@dataclass
class Calls:
    """What one operation called."""

    functions: dict[tuple[str, str], None] = field(default_factory=dict)
    """Each (file, qualified name), in the order of the first call."""
    edges: set[tuple[str, str]] = field(default_factory=set)
    """Each (file of the caller, file of the callee) that differ."""

    def add(self, function: tuple[str, str], caller: str) -> None:
        """Count a call of `function` (file, name) from the file `caller`, which may be unknown."""
        self.functions.setdefault(function)
        if caller and caller != function[0]:
            self.edges.add((caller, function[0]))

    @property
    def files(self) -> int:
        """How many files the functions are in."""
        return len({file for file, _ in self.functions})

    @property
    def both_ways(self) -> int:
        """How many pairs of files call each other."""
        return sum((there, here) in self.edges for here, there in self.edges) // 2


class Recorder:
    """A profile function for all threads that starts after it; records while `recording`."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.recording = False
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record what is called in this block, on every thread."""
        self.calls = Calls()
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def _see(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self.recording or event != "call":
            return
        found = _place(frame)
        if found is None:
            return
        self.calls.add(found, _calling_file(frame))


def _place(frame: FrameType) -> tuple[str, str] | None:
    code = frame.f_code
    if not code.co_filename.startswith(ROOT) or code.co_name in _NO_FUNCTIONS:
        return None
    if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a class, in a worker that imports it now
        return None
    return code.co_filename[len(ROOT) :], code.co_qualname


def watch_worker(log: str) -> None:
    """Write each function that this process, or one that it forks, calls while there is a file `log`.on."""
    switch = log + ".on"
    seen: set[tuple[str, str, str]] = set()

    def see(frame: FrameType, event: str, _argument: object) -> None:
        found = _place(frame) if event == "call" else None
        if found is None or not os.path.exists(switch):
            return
        line = (*found, _calling_file(frame))
        if line not in seen:
            seen.add(line)
            with open(log, "a", encoding="utf-8") as out:
                out.write("\t".join(line) + "\n")

    threading.setprofile(see)
    sys.setprofile(see)


def _calling_file(frame: FrameType) -> str:
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
        caller = caller.f_back
    return "" if caller is None else caller.f_code.co_filename[len(ROOT) :]


# --- the operations ---


async def post_to_sse(recorder: Recorder, directory: Path) -> None:
    """POST of one record to a durable topic, until a watcher has its frame."""
    from penstock.servers import ServerSettings, serve_topics
    from penstock.topics import Engine

    settings = ServerSettings.from_env({"TOPICS_PORT": "0", "TOPICS_DATA_DIR": str(directory)})
    bound: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
    stop, ready = asyncio.Event(), asyncio.Event()

    def note(host: str, port: int) -> None:
        bound.set_result((host, port))

    engine = Engine(settings.engine)
    serving = asyncio.create_task(serve_topics(settings, engine, stop, on_bound=note, on_ready=ready.set))
    address = await bound
    await ready.wait()
    await _http(address, "PUT", "/v0/topics/t", b'{"durability":"fsync"}')
    session = json.loads(await _http(address, "POST", "/v0/watch", b'{"topics":{"t":{}}}'))
    reader, writer = await asyncio.open_connection(*address)
    host = f"{address[0]}:{address[1]}"
    writer.write(f"GET /v0/watch/{session['wid']} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())

    async def post(number: int) -> None:
        await _http(address, "POST", "/v0/topics/t", b'{"records":[{"data":{"n":%d}}]}' % number)
        while f'"n":{number}' not in (await reader.readline()).decode():
            pass

    await post(1)
    await asyncio.sleep(_REST_S)
    with recorder.record():
        await post(2)
    writer.close()
    stop.set()
    await serving


async def produce_durable(recorder: Recorder, directory: Path) -> None:
    """`produce` of a list, until it is durable in a directory."""
    from penstock.buffer import Producer, ProducerConfig
    from penstock.objects import StoreConfig

    config = ProducerConfig(store=StoreConfig(url=directory.as_uri()), flush_interval="10ms")
    async with Producer(config) as producer:
        await (await producer.produce([b"a"] * 10)).watcher.await_durable()
        await asyncio.sleep(_REST_S)
        with recorder.record():
            await (await producer.produce([b"b"] * 10)).watcher.await_durable()


async def otlp_request(recorder: Recorder, directory: Path) -> None:
    """An OTLP request over HTTP, until it is answered."""
    async with _collector(directory) as (send, exported):
        await send()
        await exported()
        with recorder.record():
            await send()


async def segment_to_ack(recorder: Recorder, directory: Path) -> None:
    """A segment from its seal to its export over OTLP/HTTP and the durable ack."""
    async with _collector(directory) as (send, exported):
        await send()
        await exported()
        await send()
        with recorder.record():
            await exported()
            await asyncio.sleep(_REST_S)


def micro_batch(recorder: Recorder, directory: Path) -> None:
    """A micro-batch of a pipeline from a queue into Delta, in the driver and in Spark's Python processes."""
    from penstock.spark import Pipeline, build_session

    log = directory / "calls"
    hook = directory / "hook" / "sitecustomize.py"
    hook.parent.mkdir()
    hook.write_text(
        f"import sys; sys.path.append({str(Path(__file__).resolve().parent)!r})\n"
        f"import call_paths; call_paths.watch_worker({str(log)!r})\n",
        encoding="utf-8",
    )
    path = [str(hook.parent), str(Path(ROOT).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    settings: dict[str, Any] = {
        "name": "traced",
        "source": {"buffer": {"store": str(directory / "queue")}},
        "decode": {"format": "json", "schema": "n bigint"},
        "sink": {"delta": {"path": str(directory / "table")}},
        "checkpoint": str(directory / "checkpoint"),
        "trigger": {"interval": "1s"},
    }
    spark = build_session("traced", master="local[1]")
    try:
        _produce(directory, 1)
        running = Pipeline.from_mapping(settings).start(spark)
        _wait_for(lambda: len(_commits(directory)) >= 1)
        time.sleep(_SETTLED_S)
        switch = Path(f"{log}.on")
        switch.touch()
        with recorder.record():
            _produce(directory, 2)
            _wait_for(lambda: len(_commits(directory)) >= 2)
            time.sleep(_SETTLED_S)
        switch.unlink()
        running.request_stop()
        running.wait(_DEADLINE_S)
    finally:
        spark.stop()
    for line in log.read_text(encoding="utf-8").splitlines():
        file, name, caller = line.split("\t")
        recorder.calls.add((file, name), caller)


OPERATIONS: Final[dict[str, tuple[str, Callable[[Recorder, Path], Awaitable[None] | None]]]] = {
    "post": ("POST of a record, fsync, frame of a watcher", post_to_sse),
    "produce": ("`produce`, durable in a directory", produce_durable),
    "otlp": ("OTLP request, answered", otlp_request),
    "segment": ("segment sealed, exported, acknowledged", segment_to_ack),
    "spark": ("Spark micro-batch from a queue into Delta", micro_batch),
}


# --- what they need ---


async def _http(
    address: Address, method: str, path: str, body: bytes, kind: str = "application/json"
) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    head = f"{method} {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 2"):
        raise SystemExit(f"{method} {path} was refused: {answer.decode(errors='replace')}")
    return answer.partition(b"\r\n\r\n")[2]


class _Destination(BaseHTTPRequestHandler):
    """An OTLP/HTTP server that accepts everything and says that it arrived."""

    protocol_version = "HTTP/1.1"
    arrived = threading.Semaphore(0)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.arrived.release()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.asynccontextmanager
async def _collector(
    directory: Path,
) -> AsyncIterator[tuple[Callable[[], Awaitable[object]], Callable[[], Awaitable[None]]]]:
    """A collector with one destination: a function that sends it spans, and one that awaits an export."""
    from penstock.collector import Collector, load_plan
    from penstock.otlp import Signal
    from penstock.testing.otlp_kit import telemetry

    far = ThreadingHTTPServer(("127.0.0.1", 0), _Destination)
    threading.Thread(target=far.serve_forever, daemon=True).start()
    file = directory / "collector.yaml"
    file.write_text(_COLLECTOR.format(dir=directory, far=far.server_address[1]), encoding="utf-8")
    body = telemetry(Signal.TRACES, items=100)
    try:
        async with Collector(load_plan(file, {})) as collector:
            found = collector.addresses["in"][-1]

            async def send() -> object:
                return await _http(
                    (found.host, found.port), "POST", "/v1/traces", body, "application/x-protobuf"
                )

            async def exported() -> None:
                await asyncio.to_thread(_Destination.arrived.acquire)
                await asyncio.sleep(_REST_S)

            yield send, exported
    finally:
        far.shutdown()
        far.server_close()


_COLLECTOR: Final = """
nodes:
  in:
    kind: receiver
    plugin_urn: urn:otel:otlp:receiver
    out_ports: {{out_port: {{destinations: [keep]}}}}
    config: {{http_listening_addr: "127.0.0.1:0"}}
  keep:
    kind: processor
    plugin_urn: urn:otap:processor:persistence
    out_ports: {{out_port: {{destinations: [out]}}}}
    config:
      path: "{dir}/quiver"
      otlp_handling: arrow
      segment: {{max_open_duration: 500ms}}
      wal: {{flush_interval: 2ms}}
      retention: {{min_free: 0}}
  out:
    kind: exporter
    plugin_urn: urn:otel:otlp:exporter
    config: {{http_endpoint: "http://127.0.0.1:{far}"}}
dead_letters: "{dir}/dead"
"""


def _produce(directory: Path, number: int) -> None:
    """Put a record into the queue, from another process, so that its functions do not count."""
    command = [sys.executable, "-m", "penstock.cli", "buffer", "produce", str(directory / "queue")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(Path(ROOT).parent)
    subprocess.run(command, input=b'{"n":%d}\n' % number, env=environment, check=True, capture_output=True)


def _commits(directory: Path) -> list[Path]:
    return [path for path in directory.glob("checkpoint/commits/*") if path.name.isdecimal()]


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the pipeline did not finish its micro-batch in time")
        time.sleep(0.1)


def trace(name: str) -> Calls:
    """Run one operation and return what it called."""
    recorder = Recorder()
    directory = Path(tempfile.mkdtemp(prefix="call-paths-"))
    try:
        done = OPERATIONS[name][1](recorder, directory)
        if done is not None:
            asyncio.run(_bounded(done))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        shutil.rmtree(directory, ignore_errors=True)
    return recorder.calls


async def _bounded(operation: Awaitable[None]) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        await operation


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("operations", nargs="*", choices=[*OPERATIONS, []], help="which; all by default")
    parser.add_argument("--list", action="store_true", help="print the functions too")
    options = parser.parse_args()
    print("| operation | functions | files | pairs of files that call each other |")
    print("|---|---|---|---|")
    for name in options.operations or OPERATIONS:
        calls = trace(name)
        counts = f"{len(calls.functions)} | {calls.files} | {calls.both_ways}"
        print(f"| {OPERATIONS[name][0]} | {counts} |", flush=True)
        if options.list:
            for file, function in calls.functions:
                print(f"{file} {function}")


if __name__ == "__main__":
    main()
