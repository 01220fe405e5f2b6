"""The ledger: which locations were dequeued lately, so that a producer can learn its append landed.

A side object beside the manifest, written by the consumer *before* it dequeues. It has the manifest's own
format, holding the last entries that left the queue, without metadata. What it says is true for ever (a
number, once handed out, never changes its location), so even a fenced consumer cannot make it lie. It
is replaced conditionally, so neither can one make it forget; only its length does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.buffer import manifest
from penstock.buffer.manifest import Footer, NewEntry

__all__ = ["LEDGER_ENTRIES", "Ledger", "read_ledger", "remember"]

LEDGER_ENTRIES = 4096
"""How far back the ledger reaches: about 250 KiB, and hours of appends by one producer."""

_EMPTY = Footer(entry_count=0, next_sequence=0, epoch=0).pack()


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger as it is stored and what it says. `after` edits the bytes: no old entry is encoded again."""

    raw: bytes = _EMPTY
    known: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, raw: bytes) -> Ledger:
        """Raises `SerializationError`."""
        return cls(raw, dict(manifest.index(raw).locations()))

    def after(self, removed: Sequence[tuple[int, str]], *, epoch: int) -> Ledger:
        """The ledger after `removed` (ascending) left the queue.

        Numbers in the format rise by one, so what lies before a hole is forgotten, as is what lies before the
        last `LEDGER_ENTRIES`.
        """
        following = manifest.read_footer(self.raw).next_sequence
        if not removed:
            return Ledger(manifest.set_epoch(self.raw, epoch), self.known)
        numbers = [sequence for sequence, _ in removed]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))) or (
            self.known and numbers[0] != following
        ):
            return _merged(self.known, removed, epoch=epoch)
        dropped = max(0, len(self.known) + len(removed) - LEDGER_ENTRIES)
        if not self.known or dropped >= len(self.known):
            return _merged({}, removed, epoch=epoch)
        oldest = following - len(self.known)
        kept = manifest.dequeue(self.raw, oldest + dropped - 1) if dropped else self.raw
        added = [NewEntry(location=location, metadata=()) for _, location in removed]
        known = {**self.known, **dict(removed)}
        for sequence in range(oldest, oldest + dropped):
            del known[sequence]
        return Ledger(manifest.set_epoch(manifest.append(kept, added), epoch), known)


def read_ledger(raw: bytes) -> dict[int, str]:
    """Sequence to location, of what the ledger remembers. Raises `SerializationError`."""
    return dict(manifest.index(raw).locations())


def remember(
    known: Mapping[int, str], removed: Sequence[tuple[int, str]], *, epoch: int
) -> tuple[bytes, dict[int, str]]:
    """The ledger after `removed` (ascending) left the queue, and what it then knows. Encodes all of it."""
    ledger = _merged(known, removed, epoch=epoch)
    return ledger.raw, dict(ledger.known)


def _merged(known: Mapping[int, str], removed: Sequence[tuple[int, str]], *, epoch: int) -> Ledger:
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
    return Ledger(raw, dict(kept))
