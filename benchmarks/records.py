"""Records for benchmarks: JSON text with entropy, of slightly different lengths."""

from __future__ import annotations

import functools
import random

import pyarrow as pa

__all__ = ["CALL_BYTES", "MIB", "array_of", "calls_of"]

MIB = 1024 * 1024
CALL_BYTES = MIB
"""Record bytes of one `produce` call."""

_POOL_BYTES = 16 * MIB  # far larger than the window in which zstd finds repetitions
_WORDS = ("accepted", "checkout", "eu-west", "declined", "mobile", "refund", "us-east", "retry", "web")


def _record(rng: random.Random, size: int) -> bytes:
    length = size + rng.randint(-size // 10, size // 10)
    words = " ".join(rng.choices(_WORDS, k=max(2, length // 16)))
    text = (
        f'{{"id":"{rng.getrandbits(64):016x}","at":{1_760_000_000_000 + rng.randrange(10**9)},'
        f'"user":{rng.randrange(10**6)},"amount":{rng.random() * 1000:.2f},'
        f'"trace":"{rng.randbytes(16).hex()}","text":"{words}"}}'
    )
    return text.encode().ljust(length, b" ")[:length]


@functools.cache
def _pool(size: int, seed: int) -> pa.BinaryArray:
    rng = random.Random(seed)
    return pa.array([_record(rng, size) for _ in range(_POOL_BYTES // size)], pa.binary())


def array_of(total_bytes: int, size: int, seed: int = 1) -> pa.BinaryArray:
    """Return about `total_bytes` of records of around `size` bytes, in separate memory."""
    pool = _pool(size, seed)
    copies = -(-total_bytes // _POOL_BYTES)
    return pa.concat_arrays([pool] * max(2, copies))[: total_bytes // size]


def calls_of(records: pa.BinaryArray, size: int, call_bytes: int = CALL_BYTES) -> list[pa.BinaryArray]:
    """Return the same records as inputs of `produce` calls."""
    step = call_bytes // size
    return [records[start : start + step] for start in range(0, len(records), step)]
