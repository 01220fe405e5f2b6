"""The ledger: which locations were dequeued lately, so that a producer can learn its append landed.

A side object beside the manifest, written by the consumer *before* it dequeues. It has the manifest's own
format, holding the last entries that left the queue, without metadata. What it says is true for ever (a
number, once handed out, never changes its location), so even a fenced consumer cannot make it lie. It
is replaced conditionally, so neither can one make it forget; only its length does.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.buffer import manifest
from penstock.buffer.manifest import Footer, NewEntry

__all__ = ["LEDGER_ENTRIES", "read_ledger", "remember"]

LEDGER_ENTRIES = 4096
"""How far back the ledger reaches: about 250 KiB, and hours of appends by one producer."""


def read_ledger(raw: bytes) -> dict[int, str]:
    """Sequence to location, of what the ledger remembers. Raises `SerializationError`."""
    return dict(manifest.index(raw).locations())


def remember(
    known: dict[int, str], removed: Sequence[tuple[int, str]], *, epoch: int
) -> tuple[bytes, dict[int, str]]:
    """The ledger after `removed` (ascending) left the queue, and what it then knows.

    Numbers in the format rise by one, so what lies before a hole is forgotten.
    """
    merged = {**known, **dict(removed)}
    kept: list[tuple[int, str]] = []
    for sequence in sorted(merged, reverse=True)[:LEDGER_ENTRIES]:
        if kept and kept[-1][0] != sequence + 1:
            break
        kept.append((sequence, merged[sequence]))
    kept.reverse()
    first = kept[0][0] if kept else 0
    raw = Footer(entry_count=0, next_sequence=first, epoch=epoch).pack()
    raw = manifest.append(raw, [NewEntry(location=location, metadata=()) for _, location in kept])
    return raw, dict(kept)
