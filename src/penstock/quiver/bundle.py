"""What a consumer gets: one bundle of rows, and the four things it can say about it."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import pyarrow as pa

from penstock.quiver.claims import Claim
from penstock.quiver.model import BundleRef, Signal
from penstock.units import DurationLike, parse_duration

__all__ = ["Bundle", "Resolver"]


class Resolver(Protocol):
    """Who takes the answers; `Deliveries` does."""

    def ack(self, claim: Claim) -> bool: ...
    def nack(self, claim: Claim, reason: str = "", *, retry_after_s: float | None = None) -> bool: ...
    def reject(self, claim: Claim, reason: str = "", *, items: int = 0) -> bool: ...
    def defer(self, claim: Claim, delay_s: float | None = None) -> bool: ...
    def abandon(self, claim: Claim) -> None: ...


class Bundle:
    """One accepted batch of one stream, claimed for one consumer.

    Answer it with `ack`, `nack`, `reject` or `defer`; the first answer counts. Each returns False when it was
    too late: the lease had run out and the bundle belongs to somebody else, or it was answered before. Then
    nothing is recorded. As a context manager, leaving without an answer defers the bundle, and so does
    forgetting it.

    Answers change memory only and never wait; acks are synced every `ack.flush_interval`. A crash before that
    hands the bundle out again.
    """

    __slots__ = ("__weakref__", "_claim", "_resolver", "_told", "batch", "items")

    def __init__(self, claim: Claim, batch: pa.RecordBatch, *, items: int, resolver: Resolver) -> None:
        self._claim: Claim | None = claim
        self._told = claim
        self._resolver = resolver
        self.batch = batch
        """The rows. Zero-copy; they stay valid while referred to, also after the file is deleted."""
        self.items = items
        """Spans, data points or log records in it."""

    @property
    def ref(self) -> BundleRef:
        """Segment and place in it: unique within the core, and the same when it is delivered again."""
        return self._told.ref

    @property
    def signal(self) -> Signal:
        return self._told.info.signal

    @property
    def slot(self) -> int:
        """The kind of payload, by its number."""
        return self._told.info.slot

    @property
    def attempt(self) -> int:
        """1 for the first try."""
        return self._told.attempt

    @property
    def subscriber(self) -> str:
        return self._told.subscriber

    @property
    def is_resolved(self) -> bool:
        """Whether this bundle was answered."""
        return self._claim is None

    def ack(self) -> bool:
        """It was taken, and need not be kept for this subscriber."""
        claim = self._answer()
        return claim is not None and self._resolver.ack(claim)

    def nack(self, reason: str = "", retry_after: DurationLike | None = None) -> bool:
        """It could not be taken now. It comes again after a growing wait, or `retry_after` if longer."""
        wait_s = None if retry_after is None else parse_duration(retry_after)
        claim = self._answer()
        return claim is not None and self._resolver.nack(claim, reason, retry_after_s=wait_s)

    def reject(self, reason: str = "") -> bool:
        """It can never be taken; it does not come again and is counted as lost to this subscriber."""
        claim = self._answer()
        return claim is not None and self._resolver.reject(claim, reason, items=self.items)

    def defer(self, delay: DurationLike | None = None) -> bool:
        """Not now: it comes again after `delay`, without this counting as an attempt."""
        wait_s = None if delay is None else parse_duration(delay)
        claim = self._answer()
        return claim is not None and self._resolver.defer(claim, wait_s)

    def _answer(self) -> Claim | None:
        claim, self._claim = self._claim, None
        return claim

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._claim is not None:
            self.defer()

    def __del__(self) -> None:
        # May run in any thread and in the middle of anything, so nothing here may take a lock.
        claim = getattr(self, "_claim", None)
        if claim is not None:
            self._resolver.abandon(claim)

    def __repr__(self) -> str:
        place = f"{self.ref.segment_seq}/{self.ref.bundle}"
        return f"<Bundle {place} {self.signal} items={self.items} attempt={self.attempt}>"
