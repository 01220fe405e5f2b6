"""How many bytes may be decoded at a time: bodies are small until they are, and many come at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import Unavailable
from penstock.metrics import Gauge

__all__ = ["DecodedBytes", "Held"]


class DecodedBytes:
    """Bytes of bodies that are decoded and still needed, over all requests. One event loop owns it."""

    def __init__(self, bytes_max: int, gauge: Gauge) -> None:
        """`gauge` shows how many there are."""
        self._bytes_max = bytes_max
        self._held = 0
        self._gauge = gauge

    @contextmanager
    def holding(self, size: int) -> Iterator[Held]:
        """Count `size` bytes until the end. Raises `Unavailable` if there is no room for them."""
        held = Held(self)
        try:
            held.grow_to(size)
            yield held
        finally:
            self._change(-held.size)

    def take(self, size: int) -> None:
        """Raises `Unavailable`."""
        if self._held + size > self._bytes_max:
            raise Unavailable(
                f"requests that are being read hold {self._held:,} bytes already, and there is room for "
                f"{self._bytes_max:,}: send it again"
            )
        self._change(size)

    def _change(self, size: int) -> None:
        self._held += size
        self._gauge.set(self._held)


class Held:
    """What one request holds."""

    def __init__(self, total: DecodedBytes) -> None:
        self._total = total
        self.size = 0

    def grow_to(self, size: int) -> None:
        """Hold at least so much, now that more is known. Raises `Unavailable`."""
        if size > self.size:
            self._total.take(size - self.size)
            self.size = size
