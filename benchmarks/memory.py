"""Memory of a producer whose load exceeds the disk's throughput. It stays below the configured cap."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pyarrow as pa

from crew import Crew
from penstock.buffer import Producer, ProducerConfig
from penstock.objects.local import LocalStore
from records import MIB, array_of, calls_of
from rounds import Plan, scratch
from table import Row

__all__ = ["run"]

_CAP = 128 * MIB
_FLUSH = 16 * MIB
_NOTE = (
    "a fresh process; max_inflight_bytes 128 MiB, flush size 16 MiB, every call a fresh copy of 1 MiB "
    "that only the producer holds; 'peak': most resident memory above what the process held before "
    "anything was produced, allocator slack and the caller's own garbage included; 'growth': most "
    "resident memory above what it held after the first 256 MiB, which shows whether it is flat"
)


def run(plan: Plan) -> list[Row]:
    """Measure Arrow and list input."""
    rows: list[Row] = []
    total = plan.pick(2048, 512) * MIB
    for kind in ("Arrow", "list"):
        with Crew(1) as crew, scratch(plan) as root:
            ((cold, steady),) = crew.order(_produce_here, (kind, str(root), total))
        for what, peak in (("peak", cold), ("growth", steady)):
            rows.append(
                Row(
                    section="7 memory",
                    what=f"{what}, {kind}, {total // MIB:,} MiB produced",
                    ours=peak / MIB,
                    ceiling=_CAP / MIB,
                    against="max_inflight_bytes",
                    unit="MiB",
                    bar=1.0,
                    at_most=True,
                    note=_NOTE,
                )
            )
    return rows


def _produce_here(kind: str, root: str, total: int) -> tuple[int, int]:
    calls = calls_of(array_of(32 * MIB, 200), 200)
    return asyncio.run(_produce(kind, Path(root), calls, total))


async def _produce(kind: str, root: Path, calls: list[pa.BinaryArray], total: int) -> tuple[int, int]:
    store = LocalStore(root)
    config = ProducerConfig(
        store=store, max_inflight_bytes=_CAP, flush_size_bytes=_FLUSH, flush_interval="10s"
    )
    async with Producer(config) as producer:
        await producer.produce([b"warm"])
        await producer.flush()
        cold = _reset_peak()
        await _feed(producer, kind, calls, 256 * MIB)
        steady = _reset_peak()
        cold_peak = steady[1] - cold[0]
        await _feed(producer, kind, calls, total - 256 * MIB)
        end = _reset_peak()
    await store.close()
    return max(cold_peak, end[1] - cold[0]), end[1] - steady[0]


async def _feed(producer: Producer, kind: str, calls: list[pa.BinaryArray], total: int) -> None:
    for place in range(total // MIB):
        call = calls[place % len(calls)]
        await producer.produce(call.to_pylist() if kind == "list" else call.take(pa.array(range(len(call)))))
    await producer.flush()


def _reset_peak() -> tuple[int, int]:
    """Return the resident bytes, now and at the peak since the last call, and reset the kernel's counter."""
    status = Path("/proc/self/status").read_text()
    figures = {name: int(kib) * 1024 for name, kib in re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", status)}
    Path("/proc/self/clear_refs").write_text("5")
    return figures["VmRSS"], figures["VmHWM"]
