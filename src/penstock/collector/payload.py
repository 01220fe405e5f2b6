"""The data of a bundle as sent by exporters, in one request or several, and the exporter interface."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from penstock.collector.outcome import Outcome, Verdict, delivered, refused
from penstock.errors import PenstockError
from penstock.otlp import Signal

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The identity of a bundle. Equal data always has the same identity, so files are named after it.

    `origin` identifies the directory, because segment numbers start over in a new one.
    """

    origin: str
    segment_seq: int
    bundle: int

    def __str__(self) -> str:
        return f"{self.origin}-seg{self.segment_seq:016d}-{self.bundle:08d}"


class Payload(Protocol):
    """The data that exporters send. Both forms are created on demand."""

    @property
    def signal(self) -> Signal: ...

    @property
    def place(self) -> Place | None:
        """The identity of the bundle, or None for data that is not stored."""
        ...

    @property
    def work_bytes(self) -> int:
        """The size of the columns that must be encoded first, or 0 for a request."""
        ...

    def otlp(self) -> bytes:
        """Return a serialized export request."""
        ...

    def pieces(self, limit_bytes: int) -> list[bytes]:
        """Return requests of at most `limit_bytes`. A larger item is sent alone."""
        ...

    def batch(self) -> pa.RecordBatch:
        """Return the flat columns of the signal."""
        ...


class Exporter(Protocol):
    """A destination. `send` reports a failure of the destination as an `Outcome` and never raises for it."""

    async def start(self) -> None: ...

    async def send(self, payload: Payload) -> Outcome: ...

    async def close(self) -> None: ...


class RawPayload:
    """A request as it was received."""

    __slots__ = ("_data", "place", "signal", "work_bytes")

    def __init__(self, data: bytes, signal: Signal, place: Place | None = None) -> None:
        self._data = data
        self.signal = signal
        self.place = place
        self.work_bytes = 0

    def otlp(self) -> bytes:
        return self._data

    def pieces(self, limit_bytes: int) -> list[bytes]:
        if len(self._data) <= limit_bytes:
            return [self._data]
        return ArrowPayload(self.batch(), self.signal, self.place).pieces(limit_bytes)

    def batch(self) -> pa.RecordBatch:
        """Decode the request. Raise `InvalidInput` if the bytes are not a request."""
        from penstock import otlp

        return otlp.decode(self._data, self.signal).batch


class ArrowPayload:
    """A batch of flat columns."""

    __slots__ = ("_batch", "place", "signal")

    def __init__(self, batch: pa.RecordBatch, signal: Signal, place: Place | None = None) -> None:
        self._batch = batch
        self.signal = signal
        self.place = place

    @property
    def work_bytes(self) -> int:
        return int(self._batch.nbytes)

    def otlp(self) -> bytes:
        from penstock import otlp

        return otlp.encode(self._batch, self.signal)

    def pieces(self, limit_bytes: int) -> list[bytes]:
        from penstock import otlp

        whole = self.otlp()
        return [whole] if len(whole) <= limit_bytes else otlp.split(self._batch, self.signal, limit_bytes)

    def batch(self) -> pa.RecordBatch:
        return self._batch


class JoinedPayload:
    """Several payloads of one signal as one request, because concatenated requests are one request."""

    __slots__ = ("_parts", "place", "signal")

    def __init__(self, parts: Sequence[Payload]) -> None:
        self._parts = parts
        self.signal = parts[0].signal
        self.place = None

    @property
    def work_bytes(self) -> int:
        return sum(part.work_bytes for part in self._parts)

    def otlp(self) -> bytes:
        return b"".join([part.otlp() for part in self._parts])

    def pieces(self, limit_bytes: int) -> list[bytes]:
        whole = self.otlp()
        if len(whole) <= limit_bytes:
            return [whole]
        return [piece for part in self._parts for piece in part.pieces(limit_bytes)]

    def batch(self) -> pa.RecordBatch:
        return RawPayload(self.otlp(), self.signal).batch()


_INLINE_BYTES: Final = 64 * 1024


async def send_in_pieces(
    payload: Payload, limit_bytes: int, send: Callable[[bytes], Awaitable[Outcome]]
) -> Outcome:
    """Send all pieces in order. Stop at the first that must be retried.

    A retry sends every piece again, including delivered ones: at least once, as for whole bundles. A rejected
    piece makes the whole bundle rejected, but only after the other pieces were sent.
    """
    try:
        pieces = await _pieces(payload, limit_bytes)
    except PenstockError as error:
        return refused(f"cannot encode the bundle: {error}")
    if len(pieces) == 1:
        return await send(pieces[0])
    rejected, message, refusal = 0, "", None
    for piece in pieces:
        outcome = await send(piece)
        if outcome.verdict is Verdict.RETRY:
            return outcome
        if outcome.verdict is Verdict.REJECT:
            refusal = outcome
        rejected += outcome.rejected_items
        message = message or outcome.reason
    return refusal or delivered(rejected_items=rejected, message=message)


async def _pieces(payload: Payload, limit_bytes: int) -> list[bytes]:
    """Return the pieces. Encode large columns on a thread."""
    if payload.work_bytes > _INLINE_BYTES:
        return await asyncio.to_thread(payload.pieces, limit_bytes)
    return payload.pieces(limit_bytes)
