"""Load telemetry into tables: every span, point and log record once, although the collector is killed.

    python examples/telemetry/telemetry.py [DIRECTORY]

1. Starts a collector (`collector.yaml`) that stores telemetry in DIRECTORY/quiver until it is in queues.
2. Sends OTLP to it over HTTP, as ten services would; kills it with SIGKILL halfway, and starts it again.
3. Stops it: what is still on its disk goes into the queues.
4. Runs the three pipelines (`traces.yaml`, `metrics.yaml`, `logs.yaml`) on one Spark, into Delta tables.
5. Compares what was acknowledged with what the tables hold, and writes p50 and p99 per service and minute
   (`latency.sql`) into the table DIRECTORY/lake/latency.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.otlp import Signal
from penstock.testing.otlp_kit import START_NS, telemetry

HERE = Path(__file__).parent
TABLES = {Signal.TRACES: "spans", Signal.METRICS: "metrics", Signal.LOGS: "logs"}
REQUESTS = 20
ITEMS = 100
STEP_NS = 15_000_000_000
"""Each request covers a quarter of a minute, all of them together five minutes."""


def main(root: Path) -> None:
    ports = {"grpc_port": free_port(), "http_port": free_port()}
    sent = dict.fromkeys(Signal, 0)
    with collecting(root, ports) as collector:
        send(ports["http_port"], sent, range(REQUESTS // 2))
        collector.kill()
    with collecting(root, ports) as collector:
        send(ports["http_port"], sent, range(REQUESTS // 2, REQUESTS))
        collector.send_signal(signal.SIGTERM)
        assert collector.wait() == 0
    found = load(root)
    acknowledged = {str(kind): count for kind, count in sent.items()}
    report(f"acknowledged {acknowledged}, in the tables {found}")
    assert acknowledged == found


def send(port: int, sent: dict[Signal, int], numbers: range) -> None:
    """Send requests of all three signals; each call returns when the collector has them on disk."""
    for number in numbers:
        for kind in Signal:
            start_ns = START_NS + number * STEP_NS
            body = telemetry(kind, items=ITEMS, seed=number, start_ns=start_ns, span_ns=STEP_NS // ITEMS)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", f"/v1/{kind}", body, {"Content-Type": "application/x-protobuf"})
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b""), "something was refused"
            connection.close()
            sent[kind] += ITEMS


def load(root: Path) -> dict[str, int]:
    """Load the queues into the tables, and return the number of rows of each signal."""
    from penstock.spark import build_session
    from penstock.spark.pipeline import Pipeline

    os.environ["TELEMETRY_DIR"] = str(root)
    spark = build_session("telemetry", master="local[2]")
    for kind in Signal:
        Pipeline.from_yaml(HERE / f"{kind}.yaml").start(spark, once=True).wait()
    lake = root / "lake"
    for name in (*TABLES.values(), "durations"):
        table(spark, lake / name).createOrReplaceTempView(name)
    latency = spark.sql((HERE / "latency.sql").read_text(encoding="utf-8"))
    latency.write.format("penstock-delta").mode("append").save(str(lake / "latency"))
    for row in table(spark, lake / "latency").orderBy("service_name", "minute").limit(5).collect():
        times = f"p50 {row.p50_ms:.1f} ms, p99 {row.p99_ms:.1f} ms"
        report(f"{row.service_name} {row.minute:%H:%M}: {row.spans} spans, {times}")
    counts = {str(kind): spark.table(name).count() for kind, name in TABLES.items()}
    rolled_up = spark.sql("SELECT sum(spans) FROM durations").first()[0]
    assert rolled_up == counts[Signal.TRACES], f"the roll-up counts {rolled_up} spans"
    spark.stop()
    return counts


def table(spark, path: Path):
    """Return a Delta table as Spark reads it: its current files."""
    from deltalake import DeltaTable

    return spark.read.option("basePath", str(path)).parquet(*DeltaTable(str(path)).file_uris())


@contextmanager
def collecting(root: Path, ports: dict[str, int]) -> Iterator[subprocess.Popen[str]]:
    """Run a collector while the context is open; it is ready when the context begins."""
    command = [
        sys.executable,
        "-m",
        "penstock.cli",
        "collector",
        "run",
        str(HERE / "collector.yaml"),
        "--json",
    ]
    for name, value in {"dir": root, **ports}.items():
        command += ["--set", f"{name}={value}"]
    with subprocess.Popen([*command, "--log", "error"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the collector ended during its start"
            assert json.loads(line)["event"] == "ready"
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True)
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
