"""Items that cannot be kept: ids of a wrong length. They are counted and told; the rest is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["SPAN_ID_BYTES", "TRACE_ID_BYTES", "Refusals", "id_fault"]

TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8


def id_fault(name: str, value: bytes, length: int) -> str | None:
    """What is wrong with an id; one of no bytes at all is none, and right."""
    if not value or len(value) == length:
        return None
    return f"{name} has {len(value)} bytes, expected {length}"


class Refusals:
    """How many items of one request were refused, and why the first of them was."""

    def __init__(self, items: str) -> None:
        self.count = 0
        self._items = items
        self._first = ""

    def refuse(self, faults: Iterable[str | None]) -> bool:
        """Whether one of `faults` is one; the item then counts as refused."""
        for fault in faults:
            if fault is not None:
                self.count += 1
                self._first = self._first or fault
                return True
        return False

    @property
    def message(self) -> str:
        """What the sender is told; empty when nothing was refused."""
        return f"{self.count} {self._items} refused: {self._first}" if self.count else ""
