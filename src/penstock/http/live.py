"""Responses that go on: whoever has something to send writes it when it comes.

A stream of records has no body to wait for and no end in sight. Its response carries a `Live` part, which the
connection attaches to a `Sink`. From then on bytes are written straight into the connection, without a task
or a future per piece, and the live part is told when the client falls behind, catches up, or leaves.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Live", "Sink", "Tunnel", "TunnelSink"]


class Sink(Protocol):
    """The way to one client. Nothing here waits or raises; after the end writes go nowhere."""

    @property
    def is_writable(self) -> bool:
        """Whether the client keeps up. A writer that goes on regardless fills memory."""
        ...

    def write(self, data: bytes) -> None: ...

    def end(self) -> None:
        """The response is complete; what was written still goes out. The live part is not told."""
        ...

    def cut(self) -> None:
        """Close without sending the rest; the live part is told."""
        ...


class Live(Protocol):
    """What sends into a response as long as it lasts."""

    def attach(self, sink: Sink) -> None:
        """The head of the response is on its way; begin."""
        ...

    def writable(self) -> None:
        """The client has caught up after the sink was not writable."""
        ...

    def closed(self) -> None:
        """The client has left. Called once, unless the sink was ended before."""
        ...


class TunnelSink(Sink, Protocol):
    """The sink of a connection that also listens."""

    def pause(self) -> None:
        """Read nothing more of the client until `resume`."""
        ...

    def resume(self) -> None: ...

    def hold(self, size: int) -> bool:
        """So many bytes of the client wait here; false if all connections together have no room for them."""
        ...


class Tunnel(Live, Protocol):
    """A live part that also listens: the connection speaks another protocol from here on (101)."""

    def connect(self, sink: TunnelSink) -> None:
        """Instead of `attach`."""
        ...

    def received(self, data: bytes) -> None: ...
