"""Draining a long backlog into a Delta table while sampling the memory of the driver."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.spark.tables import open_table
from penstock.spark.tables.spec import TableSpec
from records import MIB, array_of
from spark_data import OBJECT_RECORDS, RECORD_BYTES, make_queue
from spark_runs import Bench, Sink
from table import Row

__all__ = ["run"]

_BACKLOG = 100_000
_PER_TRIGGER = 4
_SAMPLE_S = 1.0
_SETTLED = 0.25
"""Share of the time after which memory counts as settled, with classes loaded and the heap in use."""
_NOTE = (
    "one micro-batch takes 4 batches of 50,000 records from a backlog of 100,000 and acknowledges the last; "
    "every record is looked at, one of 1,000 goes into a Delta table; resident memory of the Java process, "
    "of this one and of the Python processes of driver and tasks, every second; 'first' is the mean of the "
    "tenth of the time after the first quarter, 'last' that of the last tenth"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Resident bytes at one moment."""

    java: int
    python: int


def run(bench: Bench, minutes: float) -> list[Row]:
    """Measure the first, last and maximum memory over that time, and the drained records."""
    root = bench.workdir / "soak"
    records = array_of(OBJECT_RECORDS * RECORD_BYTES, RECORD_BYTES)[:OBJECT_RECORDS]
    queue = make_queue(root / "queue", _BACKLOG, records)
    table, samples, batches, rows = _drain(bench, queue, root, minutes * 60)
    if rows != table:
        raise RuntimeError(f"{rows:,} rows were committed, and the table has {table:,}")
    drained = batches * _PER_TRIGGER * OBJECT_RECORDS
    what = f"{drained / 1e6:,.0f} M records, {batches:,} micro-batches, {minutes:g} min"
    out: list[Row] = []
    for name in ("java", "python"):
        first, last, most = _figures([getattr(sample, name) for sample in samples])
        out.append(_row(f"{name} last, {what}", last, first, 1.25))
        out.append(_row(f"{name} peak", most, first, None))
    return out


def _row(what: str, ours: float, first: float, bar: float | None) -> Row:
    return Row(
        section="4 soak",
        what=what,
        ours=ours / MIB,
        ceiling=first / MIB,
        against="first",
        unit="MiB",
        bar=bar,
        at_most=True,
        note=_NOTE,
    )


def _drain(bench: Bench, queue: Path, root: Path, seconds: float) -> tuple[int, list[Sample], int, int]:
    """Return the rows in the table, the samples, the micro-batches, and the rows in its commits."""
    frame = bench.buffer(queue, maxBatchesPerTrigger=str(_PER_TRIGGER), gc_interval="1h")
    chosen = frame.where("pmod(hash(value), 1000) = 0")
    sink = Sink(format="penstock-delta", options={"path": "{out}"})
    samples: list[Sample] = []
    query = bench.start(chosen, sink, root)
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and query.isActive:
            samples.append(_sample())
            time.sleep(_SAMPLE_S)
        if not query.isActive:
            raise RuntimeError(f"the query ended by itself: {query.exception()}")
    finally:
        query.stop()
    table = open_table(TableSpec(kind="delta", path=str(root / "out")))
    versions = table.rows_by_version(str(query.id))
    return table.row_count(), samples, len(versions), sum(versions.values())


def _figures(values: list[int]) -> tuple[float, float, float]:
    """Return the first, last and maximum of the settled part."""
    begin, tenth = int(len(values) * _SETTLED), max(1, len(values) // 10)
    first, last = values[begin : begin + tenth], values[-tenth:]
    return sum(first) / len(first), sum(last) / len(last), max(values)


def _sample() -> Sample:
    java = python = 0
    for pid in _descendants(os.getpid()):
        try:
            status = Path(f"/proc/{pid}/statm").read_text().split()
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue  # the process has just ended
        resident = int(status[1]) * os.sysconf("SC_PAGE_SIZE")
        java, python = (java + resident, python) if name == "java" else (java, python + resident)
    return Sample(java=java, python=python)


def _descendants(root: int) -> list[int]:
    """Return `root` and all its descendant processes."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
