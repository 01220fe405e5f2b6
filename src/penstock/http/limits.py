"""The limits of one listener: sizes, counts and timeouts."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Every bound of the transport; each is checked before memory is taken."""

    body_bytes_max: int = 64 * 1024**2
    head_bytes_max: int = 64 * 1024
    """Request line and headers of one request."""
    head_fields_max: int = 256
    """Headers of one request, however short they are."""
    body_screened_bytes: int = 64 * 1024
    """A larger body is read only after the application has judged the head: no upload for a wrong key."""
    connections_max: int = 16_384
    pipelined_max: int = 32
    """Requests of one connection that may wait for the one being answered."""
    held_bytes_max: int = 512 * 1024**2
    """Every byte that is kept for clients, over all connections: requests from their first byte on, and
    answers that clients do not read."""
    streams_max: int = 1024
    """Concurrent requests of one HTTP/2 connection."""
    stream_window_bytes: int = 1024**2
    connection_window_bytes: int = 4 * 1024**2
    outbox_bytes_max: int = 16 * 1024**2
    """Answers of one HTTP/2 connection that wait for its windows; beyond that no new request is started."""
    resets_per_tick_max: int = 200
    """Requests that an HTTP/2 client may take back within a second."""
    idle_frames_per_tick_max: int = 1000
    """Frames of HTTP/2 within a second that bring no request: pings, settings, windows and the like. An
    answer allows for more, so that a client may move its windows as it reads."""
    head_timeout_s: int = 60
    body_timeout_s: int = 60
    """Without a single byte."""
    write_timeout_s: int = 60
    """A client that reads nothing of its answer."""
    idle_timeout_s: int = 600
    """Between two requests of an HTTP/1.1 connection."""
    linger_s: int = 2
    """How long a refused upload is still read, so that the client gets to see why."""
    ping_interval_s: int = 20
    ping_timeout_s: int = 20

    @classmethod
    def for_bodies(cls, bytes_max: int) -> HttpLimits:
        """The defaults with another cap for bodies, and what depends on it."""
        known = cls()
        return replace(
            known,
            body_bytes_max=bytes_max,
            body_screened_bytes=min(known.body_screened_bytes, bytes_max),
            held_bytes_max=max(known.held_bytes_max, 2 * bytes_max),
        )


class ByteBudget:
    """Bytes held for clients over all connections. Not thread-safe: one event loop owns it."""

    __slots__ = ("_cap", "held")

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self.held = 0

    @property
    def is_spent(self) -> bool:
        return self.held >= self._cap

    def fits(self, size: int) -> bool:
        return self.held + size <= self._cap

    def take(self, size: int) -> None:
        self.held += size

    def give(self, size: int) -> None:
        self.held -= size
        assert self.held >= 0, "more was given back than taken"
