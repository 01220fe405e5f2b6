"""A machine for the console to look at: servers, queues, a relay, a Quiver directory, a pipeline's books.

    python -m tests.console_stage --dir DIR [--keys "KEY:read"] [--port 0] [--topics 10000] [--fast]

Prints one line of JSON when it is up: `url` (with a token, unless there are keys), `parts` with pids, places.
Then it takes orders on standard input, one per line, and answers each with a line of JSON:

    url                  a new address with a new token
    log LEVEL TEXT       a line of the log
    kill PART            SIGKILL to a part
    start PART           start it again
    write N              N records into the topic `events`
    deliver              what is in the queue `events` goes into the table
    quit
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pyarrow as pa
import yaml
from tests.console_books import deliver, pipeline_settings

from penstock.buffer import Producer, ProducerConfig
from penstock.cli.pipeline_file import read_pipeline
from penstock.console import Console, ConsoleSettings
from penstock.http.auth import Keyring
from penstock.quiver import Quiver
from penstock.services.relay import Relay
from penstock.services.relay_batch import RelayConfig
from penstock.topics.client import Client
from penstock.topics.config import TopicConfig
from penstock.topics.model import NewRecord
from penstock.topics.routers.model import RouterConfig
from penstock.up import (
    DatabasePlace,
    FleetEvent,
    FleetMap,
    Level,
    LogLine,
    PartKind,
    PartState,
    PartStatus,
    PipelinePlace,
    QueuePlace,
    QuiverPlace,
    RelayPlace,
    TopicsPlace,
)
from penstock.vector.model import Vector
from penstock.vector.records import UPSERT_METADATA, encode_upserts

HOSTILE = "<script>alert('x')</script>\u202e ]]> {{7*7}} \u0000"
PREFIX, MANIFEST = "ingest", "ingest/manifest"
START_S = 60.0


@dataclasses.dataclass(slots=True)
class Child:
    """A part that is a process of its own."""

    name: str
    kind: str
    arguments: list[str]
    port_file: Path | None
    probe: str = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    state: PartState = PartState.STOPPED
    since_ms: int = 0
    restarts: int = 0
    last_error: str | None = None
    address: str | None = None


class Stage:
    """The fleet of the console: what `penstock up` would be, with fixed places. See `FleetView`."""

    def __init__(self, root: Path, *, topics: int = 0, fast: bool = False) -> None:
        self.root = root
        self._many = topics
        self._fast = fast
        self._listeners: list[Callable[[FleetEvent], None]] = []
        self._lines: list[LogLine] = []
        self._said = 0
        self._pipeline_file = root / "pipeline.yaml"
        self._watching: list[asyncio.Task[None]] = []
        self.children = {child.name: child for child in self._parts()}

    # --- as the console sees it ----------------------------------------------------------------------------

    def parts(self) -> Sequence[PartStatus]:
        """Every part, and one that is switched off."""
        off = PartStatus(
            name="collector",
            kind=PartKind.COLLECTOR,
            state=PartState.DISABLED,
            since_ms=0,
            disabled_why="pip install 'penstock[collector]'",
        )
        return [*(self._part(child) for child in self.children.values()), off]

    def _part(self, child: Child) -> PartStatus:
        return PartStatus(
            name=child.name,
            kind=PartKind(child.kind),
            state=child.state,
            since_ms=child.since_ms,
            pid=child.process.pid if child.process is not None and child.state is PartState.READY else None,
            restarts=child.restarts,
            last_error=child.last_error,
            address=child.address,
        )

    @property
    def map(self) -> FleetMap:
        """Where everything is."""
        file = self._pipeline_file
        return FleetMap(
            data_dir=str(self.root),
            topics=TopicsPlace(part="topics", data_dir=str(self.root / "topics")),
            queues=tuple(self._queue(name) for name in ("events", "metrics", "vectors")),
            relays=(RelayPlace(part="relay-events", topic="events", queue="events", app="relay:events"),),
            quivers=(QuiverPlace(name="telemetry", part="collector", path=str(self.root / "quiver")),),
            pipelines=()
            if not file.exists()
            else (PipelinePlace(name="events", part="pipeline-events", file=str(file), queue="events"),),
            databases=tuple(
                DatabasePlace(
                    name=kind.value,
                    kind=kind,
                    part=kind.value,
                    store=str(self.root / kind.value),
                    queue=queue,
                )
                for kind, queue in ((PartKind.TIMESERIES, "metrics"), (PartKind.VECTOR, "vectors"))
            ),
        )

    def log(self, after: int = 0, limit: int = 200) -> Sequence[LogLine]:
        """What was said so far."""
        return [line for line in self._lines if line.number > after][-limit:]

    def subscribe(self, listener: Callable[[FleetEvent], None]) -> Callable[[], None]:
        """See `FleetView.subscribe`."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # --- the parts -----------------------------------------------------------------------------------------

    def _parts(self) -> list[Child]:
        ports = self.root / "ports"
        ports.mkdir(parents=True, exist_ok=True)

        def served(name: str, *words: str, probe: str, **environment: str) -> Child:
            port_file = ports / name
            arguments = [*words, "--port", "0", "--port-file", str(port_file)]
            return Child(name, name, arguments, port_file, probe, environment)

        topics = Child(
            "topics",
            "topics",
            ["topics", "serve"],
            ports / "topics",
            "/v0/ready",
            {
                "TOPICS_DATA_DIR": str(self.root / "topics"),
                "TOPICS_PORT": "0",
                "TOPICS_PORT_FILE": str(ports / "topics"),
            },
        )
        series = served(
            "timeseries",
            *("timeseries", "serve", str(self.root / "timeseries"), "--buffer", self._store("metrics")),
            *("--flush-interval", "200ms", "--poll-interval", "200ms"),
            probe="/-/ready",
        )
        vector = served(
            "vector",
            *("vector", "serve", str(self.root / "vector"), "--dimensions", "3"),
            *("--buffer", self._store("vectors"), "--flush-interval", "200ms", "--poll-interval", "200ms"),
            probe="/-/ready",
        )
        relay = Child("relay-events", "relay", [], None)
        pipeline = Child("pipeline-events", "pipeline", [], None, state=PartState.READY)
        return [topics, relay, pipeline, *([] if self._fast else [series, vector])]

    def _store(self, queue: str) -> str:
        return str(self.root / "queues" / queue)

    def _queue(self, name: str) -> QueuePlace:
        return QueuePlace(
            name=name,
            store=self._store(name),
            manifest_path=MANIFEST,
            data_path_prefix=PREFIX,
        )

    def _url(self, name: str) -> str | None:
        child = self.children.get(name)
        return None if child is None or child.address is None else f"http://{child.address}"

    async def start(self) -> None:
        """Bring everything up and fill it."""
        served = [child for child in self.children.values() if child.arguments]
        await asyncio.gather(*(self.start_part(child) for child in served))
        await self._fill_topics()
        await self.start_part(self.children["relay-events"])
        self._change(self.children["pipeline-events"], PartState.READY)
        await asyncio.to_thread(self._fill_quiver)
        if not self._fast:
            await self._feed()

    async def start_part(self, child: Child) -> None:
        """Start it, and wait until it is ready."""
        if child.process is not None:
            child.restarts += 1
        if child.port_file is not None:
            child.port_file.unlink(missing_ok=True)
        if child.kind == "relay":
            url = self._url("topics") or ""
            child.arguments = [
                *("topics", "relay", "events", self._store("events"), "--url", url, "--value", "data")
            ]
        self._change(child, PartState.STARTING)
        output = (self.root / f"{child.name}.log").open("ab")
        kept = {name: text for name, text in os.environ.items() if not name.startswith("TOPICS_")}
        child.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli", *child.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**kept, **child.environment},
        )
        output.close()
        deadline = time.monotonic() + START_S
        while not await self._is_ready(child):
            if child.process.returncode is not None or time.monotonic() > deadline:
                text = (self.root / f"{child.name}.log").read_text()[-2000:]
                raise AssertionError(f"{child.name} did not start:\n{text}")
            await asyncio.sleep(0.05)
        child.last_error = None
        self._change(child, PartState.READY)
        self._watching.append(asyncio.create_task(self._watch(child, child.process)))

    async def _is_ready(self, child: Child) -> bool:
        if child.port_file is None:
            return True
        if not child.port_file.exists():
            return False
        child.address = child.port_file.read_text()
        async with httpx.AsyncClient(trust_env=False) as http:
            with contextlib.suppress(httpx.HTTPError):
                return (await http.get(f"http://{child.address}{child.probe}")).status_code == 200
        return False

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if child.process is process:
            child.address = None
            child.last_error = f"ended with {code}"
            self._change(child, PartState.FAILED)
            self.say(child.name, Level.ERROR, child.last_error)

    def _change(self, child: Child, state: PartState) -> None:
        child.state, child.since_ms = state, time.time_ns() // 1_000_000
        self._tell(self._part(child))

    def say(self, part: str, level: Level, text: str) -> None:
        """A line of the log."""
        self._said += 1
        line = LogLine(
            number=self._said, at_ms=time.time_ns() // 1_000_000, part=part, level=level, text=text
        )
        self._lines.append(line)
        del self._lines[:-500]
        self._tell(line)

    def _tell(self, change: FleetEvent) -> None:
        for tell in self._listeners:
            tell(change)

    def kill(self, name: str) -> None:
        """End a part as a crash would."""
        process = self.children[name].process
        assert process is not None
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        """End everything."""
        for child in self.children.values():
            if child.process is not None and child.process.returncode is None:
                child.process.kill()
                await child.process.wait()
        for task in self._watching:
            await task

    # --- what is in them -----------------------------------------------------------------------------------

    async def write(self, count: int, start: int = 0) -> None:
        """Records into the topic `events`; every tenth does not fit the pipeline's schema."""
        names = ("ada", "grace", HOSTILE, "lin")
        records = [
            NewRecord(
                data=_json({"n": HOSTILE} if place % 10 == 7 else {"n": place, "who": names[place % 4]}),
                tag=f"kind.{'odd' if place % 2 else 'even'}",
                node=f"node-{place % 3}",
            )
            for place in range(start, start + count)
        ]
        async with Client(self._url("topics") or "") as client:
            await client.write("events", records)

    async def _fill_topics(self) -> None:
        url = self._url("topics") or ""
        queue = ProducerConfig(store=self._store("events"))
        async with Client(url) as client:
            await client.put_topic("events", TopicConfig(durable=True))
            for step in range(6):  # one batch of the queue each
                await self.write(20, 20 * step)
                await Relay(client, RelayConfig(topic="events", queue=queue, value="data")).run(once=True)
            await self._fill_others(client)
            for start in range(0, self._many, 100):
                numbers = range(start, min(start + 100, self._many))
                await asyncio.gather(*(client.put_topic(f"many-{number:05d}") for number in numbers))
        await self._deliver(leave=2)

    async def _fill_others(self, client: Client) -> None:
        await client.put_topic("capped", TopicConfig(cap_records=5))
        await client.write("capped", [{"n": number} for number in range(12)])
        await client.write("gappy", [{"n": number} for number in range(20)], tag="keep")
        await client.write("gappy", [{"n": number} for number in range(4)], tag="drop")
        await client.write("gappy", [{"n": number} for number in range(6)], tag="keep")
        await client.delete("gappy", match="drop")
        await client.delete("gappy", before_seq=4)
        await client.put_topic(
            "jobs", TopicConfig(type="queue", dead_letter="jobs-dead", max_deliveries=1, lease_ms=60_000)
        )
        await client.write("jobs", [{"job": HOSTILE}, *({"job": number} for number in range(4))])
        held = await client.claim("jobs", "worker-1", max=2)
        jobs = held.jobs()
        await client.nack("jobs", "worker-1", jobs[:1])
        await client.claim("jobs", "worker-2")  # finds that the first was delivered often enough
        await client.put_router("copy-odd", RouterConfig(source="events", dest="odd-events"))

    async def _deliver(self, leave: int = 0) -> int:
        file = self._pipeline_file
        if not file.exists():
            file.write_text(yaml.safe_dump(pipeline_settings(self._store("events"))))
        lines = await asyncio.to_thread(lambda: deliver(read_pipeline(file), leave=leave))
        return len(lines)

    async def deliver(self) -> int:
        """What is in the queue goes into the table, as micro-batches; how many."""
        return await self._deliver()

    def _fill_quiver(self) -> None:
        with Quiver.open(str(self.root / "quiver"), maintenance=False) as quiver:
            quiver.register("archive")
            quiver.register("lake")
            for number in range(6):
                quiver.ingest(pa.record_batch({"n": list(range(number, number + 50))}))
                quiver.flush()
            for name, answered in (("archive", (1, 2, 4)), ("lake", (1,))):
                quiver.activate(name)
                for segment in answered:
                    quiver.ack_segment(name, segment)

    async def _feed(self) -> None:
        from penstock.services.timeseries_feed import METRICS_PAYLOAD

        async with Producer(ProducerConfig(store=self._store("metrics"))) as producer:
            for step in range(3):
                await producer.produce([_metrics(step)], METRICS_PAYLOAD)
                await producer.flush()
        rng = random.Random(7)
        vectors = [
            Vector(
                id=f"v{number}",
                vector=[rng.random() for _ in range(3)],
            )
            for number in range(20)
        ]
        async with Producer(ProducerConfig(store=self._store("vectors"))) as producer:
            await producer.produce([encode_upserts(vectors)], UPSERT_METADATA)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _metrics(step: int) -> bytes:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="stage_load")
    now_ns = time.time_ns()
    for back in range(10):
        point = metric.gauge.data_points.add(as_double=step * 10 + back)
        point.time_unix_nano = now_ns - (10 - back + (2 - step) * 10) * 1_000_000_000
    return bytes(request.SerializeToString())


async def _serve(options: argparse.Namespace) -> None:
    stage = Stage(Path(options.dir), topics=options.topics, fast=options.fast)
    try:
        await stage.start()
        settings = ConsoleSettings(port=options.port, keys=Keyring.parse(options.keys, "--keys"))
        console = Console(stage, settings)
        await console.start()
        stage.say("console", Level.INFO, "the console is up")
        try:
            _print({"url": console.url, "parts": {part.name: part.pid for part in stage.parts()}})
            await _orders(stage, console)
        finally:
            await console.close()
    finally:
        await stage.close()


async def _orders(stage: Stage, console: Console) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().strip():
        word, _, rest = line.partition(" ")
        if word == "quit":
            return
        _print(await _obey(stage, console, word, rest))


async def _obey(stage: Stage, console: Console, word: str, rest: str) -> dict[str, object]:
    if word == "url":
        return {"url": console.new_url()}
    if word == "log":
        level, _, text = rest.partition(" ")
        stage.say("stage", Level[level.upper()], text)
    elif word == "kill":
        stage.kill(rest)
    elif word == "start":
        await stage.start_part(stage.children[rest])
        if rest == "topics":  # it has another address now
            stage.kill("relay-events")
            await stage.start_part(stage.children["relay-events"])
    elif word == "write":
        await stage.write(int(rest), 1000)
    elif word == "deliver":
        return {"micro_batches": await stage.deliver()}
    else:
        return {"error": f"no such order: {word}"}
    return {"done": word}


def _print(value: object) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description="A machine for the console to look at.")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--keys", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--topics", type=int, default=0, help="So many empty topics more.")
    parser.add_argument("--fast", action="store_true", help="Without the databases.")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
