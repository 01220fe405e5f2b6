"""Records per second through Spark: our source and sinks compared with Spark's, on the same records."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial

from rounds import Rates, interleave
from spark_data import BatchFiles, make_files
from spark_runs import BUFFER, DELTA, NOOP, PARQUET, Bench
from table import Row

__all__ = ["read", "write"]

_READ_NOTE = (
    "one micro-batch over everything, column value, into Spark's noop sink; addBatch of the query's "
    "progress, one warm-up round dropped, ratios within a round; Parquet files: Spark's own file stream, "
    "one file for each batch object (snappy, or zstd beside a zstd queue); Arrow files: a Python source "
    "that maps uncompressed Arrow files into memory and hands them over as they are, one task per core"
)
_WRITE_NOTE = (
    "the same source and records into a fresh output; Spark's Parquet sink and penstock-delta compress with "
    "snappy, penstock-buffer does not compress; ours sync every file before they commit, Spark's does not"
)
_PATIENCE_S = 240.0


def read(bench: Bench, records: int, rounds: int) -> list[Row]:
    """Compare the source with Spark's Parquet stream and the ceiling of Python sources, raw and zstd."""
    rows: list[Row] = []
    for compression in ("none", "zstd"):
        files = make_files(bench.workdir / f"files-{compression}", records, compression)
        contenders = {
            "buffer": lambda files=files: bench.drain(bench.whole(files), NOOP, files.records),
            "parquet": lambda files=files: bench.drain(bench.parquet(files), NOOP, files.records),
            "arrow": lambda files=files: bench.drain(bench.arrow(files), NOOP, files.records),
        }
        rates = _rates(contenders, files, rounds)
        shutil.rmtree(bench.workdir / f"files-{compression}")
        judge = partial(_row, rates, "1 source", _READ_NOTE, what=_what("buffer -> noop", files, compression))
        rows.append(judge(ours="buffer", theirs="parquet", against="Parquet file stream", bar=1.0))
        # The Arrow files are not compressed, so the comparison with zstd has no threshold.
        bar = 0.7 if compression == "none" else None
        rows.append(judge(ours="buffer", theirs="arrow", against="mapped Arrow files", bar=bar))
    return rows


def write(bench: Bench, records: int, rounds: int) -> list[Row]:
    """Compare the sinks with Spark's Parquet sink, after the same source."""
    files = make_files(bench.workdir / "files-write", records, "none")
    contenders = {
        sink.format: lambda sink=sink: bench.drain(bench.whole(files), sink, files.records)
        for sink in (PARQUET, DELTA, BUFFER)
    }
    rates = _rates(contenders, files, rounds)
    shutil.rmtree(bench.workdir / "files-write")
    return [
        _row(
            rates,
            "2 sinks",
            _WRITE_NOTE,
            what=_what(f"buffer -> {sink.format}", files, "none"),
            ours=sink.format,
            theirs=PARQUET.format,
            against="Spark's Parquet sink",
            bar=0.9,
        )
        for sink in (DELTA, BUFFER)
    ]


def _rates(contenders: Mapping[str, Callable[[], float]], files: BatchFiles, rounds: int) -> Rates:
    return interleave(contenders, work=files.records, rounds=rounds, patience_s=_PATIENCE_S)


def _what(path: str, files: BatchFiles, compression: str) -> str:
    kind = ", zstd" if compression == "zstd" else ""
    return f"{path}, {files.records / 1e6:g} M x 200 B{kind}"


def _row(
    rates: Rates,
    section: str,
    note: str,
    *,
    what: str,
    ours: str,
    theirs: str,
    against: str,
    bar: float | None,
) -> Row:
    return Row(
        section=section,
        what=what,
        ours=rates.median(ours) / 1e3,
        ceiling=rates.median(theirs) / 1e3,
        ratio=rates.ratio(ours, theirs),
        against=against,
        unit="k rec/s",
        bar=bar,
        note=note,
    )
