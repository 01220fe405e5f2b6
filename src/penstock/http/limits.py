"""The limits of one listener: sizes, counts and timeouts."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Every limit of the transport. Each is checked before memory is allocated."""

    body_bytes_max: int = 64 * 1024**2
    head_bytes_max: int = 64 * 1024
    """Request line and headers of one request."""
    head_fields_max: int = 256
    """Headers of one request, regardless of their size."""
    body_screened_bytes: int = 64 * 1024
    """A larger body is read only after the application has accepted the head: no upload with a wrong key."""
    connections_max: int = 16_384
    pipelined_max: int = 32
    """Requests of one connection that may wait for the current one."""
    held_bytes_max: int = 512 * 1024**2
    """All bytes held for clients, over all connections: unfinished and queued requests, and responses that
    clients have not read."""
    streams_max: int = 1024
    """Concurrent requests of one HTTP/2 connection."""
    stream_window_bytes: int = 1024**2
    connection_window_bytes: int = 4 * 1024**2
    outbox_bytes_max: int = 16 * 1024**2
    """Unsent responses of one HTTP/2 connection. Above this, no further request is started."""
    resets_per_tick_max: int = 200
    """Requests that an HTTP/2 client may cancel within one second."""
    idle_frames_per_tick_max: int = 1000
    """HTTP/2 frames within one second that carry no request, such as pings, settings and window updates. Each
    response allows some more, so that a client can update its windows as it reads."""
    head_timeout_s: int = 60
    body_timeout_s: int = 60
    """Maximum time without a byte of the body."""
    write_timeout_s: int = 60
    """Maximum time that a client may leave its response unread."""
    idle_timeout_s: int = 600
    """Maximum time between two requests of an HTTP/1.1 connection."""
    linger_s: int = 2
    """How long to keep reading a refused upload, so that the client can receive the response."""
    ping_interval_s: int = 20
    ping_timeout_s: int = 20

    @classmethod
    def for_bodies(cls, bytes_max: int) -> HttpLimits:
        """Return the defaults with another limit for bodies, and adjust the limits that depend on it."""
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
        assert self.held >= 0, "more bytes were released than reserved"
