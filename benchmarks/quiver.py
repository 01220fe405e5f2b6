"""Measure Quiver on this machine: `python benchmarks/quiver.py`.

Figures with a reference are measured in alternation with it in the same run. On a busy machine, read the
ratios. Data is written to a temporary directory on the disk under test (`--dir`) and removed afterwards.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa

from penstock.metrics import Registry
from penstock.otlp import Signal, decode
from penstock.quiver import Quiver, QuiverConfig
from penstock.testing.otlp_kit import telemetry
from rounds import Plan, interleave, scratch
from sections import run_planned
from table import Row

SPANS = 1000
_INGEST_BAR = 0.7
_SECTION = {"ingest": "1 ingest", "recovery": "2 recovery", "read": "3 reading", "memory": "4 memory"}
_INGEST = (
    f"bundles of {SPANS} spans in the flat columns, one by one and by 8 threads, each answered after a sync; "
    "bare: the same batches encoded as Arrow IPC, written to one growing file and fdatasynced one by one. "
    "Up to the answer: no segment is due meanwhile. Sustained: every byte is written a second time, into "
    "segments, on the same disk and cores"
)
_RECOVERY = (
    "a log of so many bytes and no segment, as after a kill: every checksum is gone over, every bundle is "
    "taken in and segments are written on the way; beside it the time to write the same bytes once"
)
_READ = "every bundle of committed segments, zero-copy; beside it pyarrow's own reader over the same files"
_MEMORY = "growth of resident memory by so many pending segments of one bundle each, per segment"


def settings(*, target_size: str = "32MB", **wal: object) -> QuiverConfig:
    return QuiverConfig.from_mapping(
        {
            "segment": {"target_size": target_size, "max_open_duration": "1m"},
            "wal": {"max_size": "2GB", "max_rotated_files": 1000, **wal},
            "retention": {"size_cap": "40GB", "min_free": 0},
        }
    )


def bundles(count: int) -> list[pa.RecordBatch]:
    """Return different batches, like those of a receiver."""
    return [decode(telemetry(Signal.TRACES, items=SPANS, seed=n), Signal.TRACES).batch for n in range(count)]


def encoded(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def ingest(plan: Plan) -> list[Row]:
    """Measure bundles per second into the log, compared with a bare write and fdatasync."""
    count = plan.pick(400, 150)
    batches = bundles(16)
    contenders: dict[str, Callable[[], float]] = {
        "bare": partial(_bare, plan, batches, count),
        "one": partial(_ingest, plan, batches, count, 1),
        "threads": partial(_ingest, plan, batches, count, 8),
        "sustained": partial(_ingest, plan, batches, count, 8, target_size="32MB"),
    }
    rates = interleave(contenders, work=count * SPANS, rounds=plan.pick(5, 3))
    names = {
        "one": "one writer, up to the answer",
        "threads": "8 writers, up to the answer",
        "sustained": "8 writers, sustained",
    }
    size = encoded(batches[0]).size
    return [
        Row(
            section=_SECTION["ingest"],
            what=f"{what}, {size // 1000} kB bundles",
            ours=rates.median(name),
            unit="spans/s",
            ceiling=rates.median("bare"),
            ratio=rates.ratio(name, "bare"),
            against="encode, write, fdatasync",
            bar=_INGEST_BAR if name != "sustained" else None,
            note=_INGEST,
        )
        for name, what in names.items()
    ]


def _bare(plan: Plan, batches: list[pa.RecordBatch], count: int) -> float:
    with scratch(plan) as root:
        fd = os.open(root / "file", os.O_CREAT | os.O_WRONLY)
        began = time.perf_counter()
        for n in range(count):
            os.write(fd, encoded(batches[n % len(batches)]))
            os.fdatasync(fd)
        taken = time.perf_counter() - began
        os.close(fd)
    return taken


def _ingest(
    plan: Plan, batches: list[pa.RecordBatch], count: int, writers: int, target_size: str = "1GB"
) -> float:
    config = settings(target_size=target_size)
    with scratch(plan) as root, Quiver.open(str(root), config, registry=Registry()) as quiver:
        quiver.register("nobody")

        def write(number: int) -> None:
            for n in range(number, count, writers):
                quiver.ingest(batches[n % len(batches)], signal="traces")

        write(count - 5)
        threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began


def recovery(plan: Plan) -> list[Row]:
    """Measure the time from opening a directory with a long log to accepting traffic."""
    size = plan.pick(1024, 128) * 1024**2
    config = settings(flush="none")
    with scratch(plan) as root:
        _in_process(_leave_log, root, size)
        written = int((root / "count").read_text())
        began = time.perf_counter()
        with Quiver.open(str(root), config, registry=Registry(), maintenance=False) as quiver:
            taken = time.perf_counter() - began
            quiver.flush()
            found = sum(info.bundle_count for info in quiver.core.store.infos())
        assert found == written, f"{found} of {written} bundles"
        yardstick = _write_bytes(root / "yardstick", size)
    return [
        Row(
            section=_SECTION["recovery"],
            what=f"a log of {size // 1024**2} MiB",
            ours=taken,
            ceiling=yardstick,
            unit="s",
            against="writing as many bytes once",
            at_most=True,
            note=_RECOVERY,
        )
    ]


def _leave_log(root: Path, size: int) -> None:
    """Leave a log of this size, from a process that ends without finalizing anything."""
    batches = bundles(16)
    config = QuiverConfig.from_mapping(
        {
            "segment": {"target_size": "1GB", "max_open_duration": "1h"},
            "wal": {"max_size": "4GB", "flush": "none", "max_rotated_files": 1000},
            "retention": {"size_cap": "40GB", "min_free": 0},
        }
    )
    quiver = Quiver.open(str(root), config, registry=Registry(), maintenance=False)
    count = written = 0
    while written < size:
        written += quiver.ingest(batches[count % len(batches)], signal="traces").byte_count
        count += 1
    (root / "count").write_text(str(count))
    os._exit(0)


def _in_process(work: Callable[..., None], *arguments: object) -> None:
    process = get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, f"{work.__name__} ended with {process.exitcode}"


def _write_bytes(path: Path, size: int) -> float:
    chunk = os.urandom(1024**2)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(chunk)):
            file.write(chunk)
        os.fdatasync(file.fileno())
    return time.perf_counter() - began


def read(plan: Plan) -> list[Row]:
    """Measure bundles per second from committed segments, compared with pyarrow's reader."""
    count = plan.pick(600, 200)
    batches = bundles(16)
    with (
        scratch(plan) as root,
        Quiver.open(str(root), settings(flush="none"), registry=Registry()) as quiver,
    ):
        for n in range(count):
            quiver.ingest(batches[n % len(batches)], signal="traces")
        quiver.flush()
        store = quiver.core.store
        paths = [store.path(info.seq) for info in store.infos()]
        contenders: dict[str, Callable[[], float]] = {
            "ours": partial(_read_ours, quiver),
            "pyarrow": partial(_read_pyarrow, paths),
        }
        rates = interleave(contenders, work=count * SPANS, rounds=plan.pick(7, 3))
    return [
        Row(
            section=_SECTION["read"],
            what="bundles of committed segments",
            ours=rates.median("ours"),
            ceiling=rates.median("pyarrow"),
            ratio=rates.ratio("ours", "pyarrow"),
            unit="spans/s",
            against="pyarrow over a memory map",
            note=_READ,
        )
    ]


def _read_ours(quiver: Quiver) -> float:
    began = time.perf_counter()
    total = 0
    for info in quiver.core.store.infos():
        for bundle in range(info.bundle_count):
            total += quiver.core.store.read(info.seq, bundle).num_rows
    assert total
    return time.perf_counter() - began


def _read_pyarrow(paths: list[str]) -> float:
    began = time.perf_counter()
    total = 0
    for path in paths:
        with pa.memory_map(path) as file, pa.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                total += reader.get_batch(number).num_rows
    assert total
    return time.perf_counter() - began


def memory(plan: Plan) -> list[Row]:
    """Measure the memory of a pending segment without consumers."""
    count = plan.pick(10_000, 1_000)
    with scratch(plan) as root:
        _in_process(_hold_segments, root, count)
        grown = float((root / "grown").read_text())
    return [
        Row(
            section=_SECTION["memory"],
            what=f"{count:,} pending segments",
            ours=grown,
            unit="B each",
            note=_MEMORY,
        )
    ]


def _hold_segments(root: Path, count: int) -> None:
    config = QuiverConfig.from_mapping(
        {"wal": {"flush": "none"}, "retention": {"size_cap": "40GB", "min_free": 0}}
    )
    small = pa.record_batch({"n": pa.array(range(10), pa.int64())})
    with Quiver.open(str(root), config, registry=Registry(), maintenance=False) as quiver:
        quiver.register("nobody")
        _fill(quiver, small, 100)
        before = _resident()
        _fill(quiver, small, count)
        (root / "grown").write_text(str((_resident() - before) / count))


def _fill(quiver: Quiver, batch: pa.RecordBatch, count: int) -> None:
    for _ in range(count):
        quiver.ingest(batch)
        quiver.flush()


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "ingest": ingest,
    "recovery": recovery,
    "read": read,
    "memory": memory,
}


if __name__ == "__main__":
    sys.exit(
        run_planned(
            "Measure the durable buffer for Arrow batches.",
            SECTIONS,
            quick="about a minute, with coarser figures",
        )
    )
