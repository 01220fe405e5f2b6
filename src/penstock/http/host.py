"""What all connections of one listener share."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from typing import Protocol

from penstock.clock import Clock
from penstock.http.known_heads import KnownHeads
from penstock.http.limits import ByteBudget, HttpLimits
from penstock.http.message import Application

__all__ = ["Connection", "Host"]


class Connection(Protocol):
    """One client, as its listener sees it."""

    def tick(self) -> None:
        """A second has passed: give up on whoever takes too long."""
        ...

    def drain(self) -> None:
        """Close as soon as nothing is under way; answers from now on are the last of their connection."""
        ...

    def abort(self) -> None:
        """Close now."""
        ...


class Host:
    """The application, the limits, and every connection that is open."""

    __slots__ = (
        "_chunk",
        "_chunk_data",
        "app",
        "budget",
        "clock",
        "connections",
        "date",
        "draining",
        "heads",
        "limits",
        "loop",
    )

    def __init__(
        self, app: Application, limits: HttpLimits, clock: Clock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.app = app
        self.limits = limits
        self.clock = clock
        self.loop = loop
        self.budget = ByteBudget(limits.held_bytes_max)
        self.connections: set[Connection] = set()
        self.draining = False
        self.heads = KnownHeads()
        self.date = b""
        self._chunk_data = self._chunk = b""
        self.set_date()

    def set_date(self) -> None:
        """The `Date` header, made once a second and not once a response."""
        self.date = formatdate(self.clock.now_ms() / 1000, usegmt=True).encode()

    def chunk(self, data: bytes) -> bytes:
        """The bytes as a chunk of a chunked body; made once when the same piece goes to many clients."""
        if data is not self._chunk_data:
            self._chunk_data, self._chunk = data, b"%x\r\n%b\r\n" % (len(data), data)
        return self._chunk

    @property
    def is_full(self) -> bool:
        return len(self.connections) >= self.limits.connections_max
