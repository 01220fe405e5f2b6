"""Encoding and decoding of blocks, against a memcpy of the same bytes."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.buffer.batch import CompressionType, decode_batch, encode_batch
from penstock.codec import as_binary_array, encode_records, index_block
from records import MIB, array_of
from rounds import Plan, interleave
from table import Row

__all__ = ["run"]

_REPEATS = 5  # per turn, the best one counts, so the allocator's pages are warm for all contenders

_NOTE = (
    "single thread, best of 5 per turn; memcpy: allocate a fresh pyarrow buffer of the block's size from the "
    "same memory pool that the kernels use, and copy the block into it; 'encode' keeps all pieces of the "
    "batch; 'decode' finds the records (length table checked against every header) and converts them; "
    "MB/s of block bytes"
)


def run(plan: Plan) -> list[Row]:
    """Measure blocks of 16 and 64 MiB with records of 200 B and 1 KiB."""
    rows: list[Row] = []
    for size in (200, 1024):
        for block_mib in (16, 64):
            rows += _block_rows(plan, size, block_mib)
    return rows + [_foreign_row(plan, size) for size in (10, 100, 1000)]


def _foreign_row(plan: Plan, size: int) -> Row:
    """Compare records without a length table, as other clients store them, with one plain walk."""
    lengths = np.random.default_rng(1).integers(size // 2, size * 3 // 2 + 1, 16 * MIB // (size + 4))
    data = bytes(np.random.default_rng(2).integers(0, 256, 2 * size, dtype="u1"))
    raw = b"".join(length.to_bytes(4, "little") + data[:length] for length in lengths.tolist())
    foreign, count = pa.py_buffer(raw), len(lengths)
    ways: dict[str, Callable[[], object]] = {
        "index": lambda: index_block(foreign, count),
        "walk": lambda: _walk(raw, count),
    }
    rates = interleave(
        {name: _timed(call) for name, call in ways.items()}, work=count / 1e6, rounds=plan.pick(7, 3)
    )
    return Row(
        section="1 codec",
        what=f"find records of another client, {size} B on average",
        ours=rates.median("index"),
        ceiling=rates.median("walk"),
        ratio=rates.ratio("index", "walk"),
        against="one walk in Python",
        unit="M records/s",
        bar={10: 3.0, 100: 2.5, 1000: 1.2}[size],
        note="records of 50 to 150 % of the size, random bytes, 16 MiB",
    )


def _walk(raw: bytes, count: int) -> npt.NDArray[np.uint32]:
    lengths, position, unpack = [], 0, struct.Struct("<I").unpack_from
    for _ in range(count):
        (length,) = unpack(raw, position)
        lengths.append(length)
        position += 4 + length
    return np.array(lengths, "<u4")


def _block_rows(plan: Plan, size: int, block_mib: int) -> list[Row]:
    records = array_of(block_mib * MIB, size)
    items = records.to_pylist()
    stored = memoryview(encode_batch([records], CompressionType.NONE).to_bytes())
    block = encode_records(records)
    foreign = pa.py_buffer(bytes(block))  # no length table after the records
    count = len(records)
    contenders: dict[str, Callable[[], object]] = {
        "memcpy": lambda: _memcpy(foreign),
        "encode, Arrow": lambda: list(encode_batch([records], CompressionType.NONE).parts),
        "encode, list": lambda: list(encode_batch([as_binary_array(items)], CompressionType.NONE).parts),
        "decode to Arrow": lambda: decode_batch(stored).to_arrow(),
        "decode to Arrow view": lambda: decode_batch(stored).to_arrow_view(),
        "decode to list": lambda: decode_batch(stored).to_list(),
        "decode to Arrow, no table (walk)": lambda: index_block(foreign, count).to_arrow(),
    }
    rates = interleave(
        {name: _timed(call) for name, call in contenders.items()},
        work=len(foreign) / 1e6,
        rounds=plan.pick(7, 3),
    )
    bars = {"encode, Arrow": 0.4, "decode to Arrow": 0.7, "decode to Arrow view": 0.7}
    return [
        Row(
            section="1 codec",
            what=f"{name}, {_size(size)}, {block_mib} MiB block",
            ours=rates.median(name),
            ceiling=rates.median("memcpy"),
            ratio=rates.ratio(name, "memcpy"),
            against="memcpy",
            unit="MB/s",
            bar=bars.get(name) if size == 200 else None,
            note=_NOTE,
        )
        for name in contenders
        if name != "memcpy"
    ]


def _memcpy(source: pa.Buffer) -> pa.Buffer:
    target = pa.allocate_buffer(len(source))
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    return target


def _timed(call: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        best = float("inf")
        for _ in range(_REPEATS):
            started = time.perf_counter()
            kept = call()
            best = min(best, time.perf_counter() - started)
            del kept  # exclude the time to free the memory
        return best

    return measure


def _size(size: int) -> str:
    return "1 KiB" if size == 1024 else f"{size} B"
