"""Measure the cost of persistence in the collector: `python benchmarks/collector.py`.

The same collector runs in three processes: directly from receiver to exporter, with persistence of unchanged
requests (`pass_through`), and with persistence as columns (`arrow`). All send over gRPC to a counting server
in this process. Rounds alternate.

The streaming path is what a client waits for: without persistence until the destination has answered, with it
until the log is synced. CPU is that of the collector process from the first request to the last delivery, so
it holds everything that persistence does: log, segments, reading them back, acks. On a busy machine, read the
CPU, because wall time depends more on the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio

from penstock.collector.receiver_grpc import METHODS
from penstock.otlp import count_items
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry
from sections import option_parser, run_sections, workdir
from table import Row

IN_FLIGHT = 16
MODES = ("direct", "pass_through", "arrow")
_TICKS_S = os.sysconf("SC_CLK_TCK")
_METHOD = next(method for method, signal in METHODS.items() if signal is Signal.TRACES)

_FILE = """
nodes:
  in:
    kind: receiver
    plugin_urn: urn:otel:otlp:receiver
    out_ports: {{out_port: {{destinations: [{first}]}}}}
    config: {{listening_addr: "127.0.0.1:0"}}
{keep}
  out:
    kind: exporter
    plugin_urn: urn:otel:otlp:exporter
    config: {{grpc_endpoint: "http://127.0.0.1:{port}", compression_method: {compression}}}
dead_letters: "{path}/dead"
"""
_KEEP = """
  keep:
    kind: processor
    plugin_urn: urn:otap:processor:persistence
    out_ports: {{out_port: {{destinations: [out]}}}}
    config: {{path: "{path}/quiver", otlp_handling: {mode}, retention: {{min_free: 0}}}}
"""


class FarEnd(grpc.GenericRpcHandler):
    """Server that counts spans. Waiting bundles are sent together, so requests are not a useful measure."""

    def __init__(self) -> None:
        self.count = 0
        self.port = 0

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def export(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            self.count += count_items(request, Signal.TRACES)
            return b""

        return grpc.unary_unary_rpc_method_handler(export)

    async def stop(self) -> None:
        await self._server.stop(0)


class Collector:
    """One collector process."""

    def __init__(self, mode: str, path: Path, port: int, compression: str) -> None:
        self._path = path / f"{mode}-{compression}"
        self._path.mkdir(parents=True)
        keep = "" if mode == "direct" else _KEEP.format(path=self._path, mode=mode)
        text = _FILE.format(
            first="out" if mode == "direct" else "keep",
            keep=keep,
            port=port,
            path=self._path,
            compression=compression,
        )
        file = self._path / "collector.yaml"
        file.write_text(text)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "penstock.cli",
                "collector",
                "run",
                str(file),
                "--json",
                "--log",
                "warning",
            ],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.address = json.loads(self._process.stdout.readline())["addresses"]["in"][0]

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far by all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_S

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


async def _round(
    collector: Collector, far_end: FarEnd, body: bytes, spans: int, requests: int
) -> tuple[float, float, float]:
    """Return the seconds until all were accepted, until all were delivered, and the collector's CPU
    seconds."""
    goal, cpu_s, began = far_end.count + requests * spans, collector.cpu_s(), time.perf_counter()
    left = iter(range(requests))
    async with grpc.aio.insecure_channel(collector.address) as channel:
        export = channel.unary_unary(_METHOD)

        async def client() -> None:
            for _ in left:
                await export(body)

        await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
    taken_s = time.perf_counter() - began
    while far_end.count < goal:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    delivered_s = time.perf_counter() - began
    # Later work, such as removing segments, is part of the cost.
    await asyncio.sleep(0.5)
    return taken_s, delivered_s, collector.cpu_s() - cpu_s


Measured: TypeAlias = dict[str, list[tuple[float, float, float]]]
"""Rounds of each mode: seconds until accepted, until delivered, and of CPU."""


async def _measure(path: Path, compression: str, spans: int, rounds: int, requests: int) -> Measured:
    body = telemetry(Signal.TRACES, items=spans)
    far_end = FarEnd()
    await far_end.start()
    collectors = {mode: Collector(mode, path, far_end.port, compression) for mode in MODES}
    found: Measured = {mode: [] for mode in MODES}
    try:
        for place in range(rounds + 1):
            for mode, collector in collectors.items():
                measured = await _round(collector, far_end, body, spans, requests)
                if place:  # the first round warms up
                    found[mode].append(measured)
    finally:
        for collector in collectors.values():
            collector.stop()
        await far_end.stop()
    return found


def overhead(path: Path, quick: bool, compression: str, spans: int) -> list[Row]:
    rounds, requests = (3, 60) if quick else (5, 150)
    requests *= max(1, 200 // spans)
    found = asyncio.run(_measure(path, compression, spans, rounds, requests))
    section = f"collector, {spans} spans per request, out with {compression}"
    return [row for mode in MODES for row in _rows(section, mode, found, requests * spans)]


def _rows(section: str, mode: str, found: Measured, spans: int) -> list[Row]:
    taken, _, cpu = (statistics.median(column) for column in zip(*found[mode], strict=True))
    pairs = list(zip(found[mode], found["direct"], strict=True))
    is_kept = mode != "direct"
    against = "the same without persistence" if is_kept else ""
    base_s = statistics.median(round_[0] for round_ in found["direct"])
    base_cpu = statistics.median(round_[2] for round_ in found["direct"])
    return [
        Row(
            section=section,
            what=f"{mode}: spans taken",
            ours=spans / taken,
            unit="spans/s",
            ceiling=spans / base_s if is_kept else None,
            against=against,
            ratio=statistics.median(base[0] / ours[0] for ours, base in pairs) if is_kept else None,
            bar=0.95 if mode == "pass_through" else None,
        ),
        Row(
            section=section,
            what=f"{mode}: CPU per span",
            ours=cpu / spans * 1e6,
            unit="us",
            ceiling=base_cpu / spans * 1e6 if is_kept else None,
            against=against,
            ratio=statistics.median(ours[2] / base[2] for ours, base in pairs) if is_kept else None,
            at_most=True,
            note="CPU of the collector process from the first request to the last delivery; medians",
        ),
        Row(section=section, what=f"{mode}: spans per core", ours=spans / cpu, unit="spans/s"),
    ]


SECTIONS = {"gzip": ("gzip", 1000), "none": ("none", 1000), "small": ("gzip", 20)}
"""Concurrency and spans per request: a full batch of an SDK, and a batch of a quiet service."""


def main() -> int:
    """Run the requested sections and print one table. With `--strict`, exit with 1 if a threshold is
    missed."""
    parser = option_parser("Measure what persistence costs the collector.", SECTIONS)
    parser.add_argument("--quick", action="store_true", help="about a minute, with coarser figures")
    options = parser.parse_args()
    with workdir(options.dir) as data:
        return run_sections(
            options,
            {name: partial(overhead, data / name, options.quick, *how) for name, how in SECTIONS.items()},
        )


if __name__ == "__main__":
    sys.exit(main())
