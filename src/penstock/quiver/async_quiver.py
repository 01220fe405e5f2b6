"""Quiver for an event loop: the same engine, awaited without a thread for each call."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import PenstockError, Unavailable
from penstock.ids import SYSTEM_RNG
from penstock.metrics import DEFAULT_REGISTRY, Registry
from penstock.quiver.bundle import Bundle
from penstock.quiver.claims import Claim
from penstock.quiver.config import QuiverConfig
from penstock.quiver.dataset import Instant
from penstock.quiver.engine import Quiver
from penstock.quiver.errors import AtCapacity
from penstock.quiver.model import BundleRef, Signal
from penstock.quiver.preparation import Batches, Prepared, Receipt, prepare, raw_batch
from penstock.quiver.slots import raw_slot
from penstock.quiver.stats import QuiverStats
from penstock.quiver.subscribers import Subscriber
from penstock.storage import FileSystem
from penstock.units import DurationLike, parse_duration

if TYPE_CHECKING:
    import pyarrow.dataset as ds

__all__ = ["AsyncQuiver"]

T = TypeVar("T")
_WARM_SEGMENTS: Final = 16
_WAIT_FIRST_S: Final = 0.01
_WAIT_MAX_S: Final = 0.16


class AsyncQuiver:
    """A `Quiver` whose calls do not block the loop. `ingest` and `next_bundle` wait without a thread; what is
    rare and touches the disk runs on the loop's default executor.

    Answers to a bundle (`bundle.ack()` and so on) never wait and are plain calls.
    """

    def __init__(self, quiver: Quiver) -> None:
        self._quiver = quiver
        self._core = quiver.core
        self._warm: deque[int] = deque(maxlen=_WARM_SEGMENTS)

    @classmethod
    async def open(
        cls,
        path: str | None = None,
        config: QuiverConfig | None = None,
        *,
        core_id: int = 0,
        cores: int = 1,
        fs: FileSystem | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry = DEFAULT_REGISTRY,
        maintenance: bool = True,
    ) -> AsyncQuiver:
        """As `Quiver.open`."""

        def opened() -> Quiver:
            return Quiver.open(
                path,
                config,
                core_id=core_id,
                cores=cores,
                fs=fs,
                clock=clock,
                rng=rng,
                registry=registry,
                maintenance=maintenance,
            )

        return cls(await asyncio.to_thread(opened))

    @property
    def sync(self) -> Quiver:
        """The engine itself."""
        return self._quiver

    async def ingest(
        self, data: Batches, *, signal: Signal | str | None = None, slot: int | None = None
    ) -> Receipt:
        """As `Quiver.ingest`. A task that is cancelled does not know whether its bundle was accepted."""
        self._quiver.check_open()
        return await self._accept(prepare(data, signal=signal, slot=slot))

    async def ingest_raw(self, data: bytes, signal: Signal | str) -> Receipt:
        """As `Quiver.ingest_raw`."""
        return await self.ingest(raw_batch(data), slot=raw_slot(Signal(signal)))

    async def _accept(self, bundle: Prepared) -> Receipt:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Receipt] = loop.create_future()

        def settle(receipt: Receipt | None, error: PenstockError | None) -> None:
            try:
                loop.call_soon_threadsafe(_answer, answer, receipt, error)
            except RuntimeError:
                return  # the loop is closed, and nobody waits any more

        await self._take_room(bundle.byte_count)
        try:
            self._core.intake.take(bundle, settle)
        finally:
            self._core.admission.release(bundle.byte_count)
        return await answer

    async def _take_room(self, byte_count: int) -> None:
        """Take the room for a bundle; wait on the loop, for threads are few and readers need them.

        The room is taken here, too, and not on a thread, whose answer a cancelled task never hears.
        """
        admission, clock = self._core.admission, self._core.clock
        deadline_s = clock.monotonic() + self._core.config.ingest.block_s
        wait_s = _WAIT_FIRST_S
        while not admission.reserve(byte_count):
            try:
                await self._run(lambda: admission.make_way(byte_count))
            except AtCapacity:
                if clock.monotonic() >= deadline_s:
                    raise
                await clock.sleep(wait_s)
                wait_s = min(2 * wait_s, _WAIT_MAX_S)
                self._quiver.check_open()

    async def next_bundle(self, subscriber: str, timeout: DurationLike | None = 0) -> Bundle | None:
        """As `Quiver.next_bundle`."""
        timeout_s = None if timeout is None else parse_duration(timeout)
        while True:
            self._quiver.check_open()
            claim = await self._core.deliveries.take_async(subscriber, timeout_s)
            if claim is None:
                return None
            bundle = await self._read(claim)
            if bundle is not None:
                return bundle

    async def _read(self, claim: Claim) -> Bundle | None:
        """The first read of a segment may go over all of its bytes; what follows is a look into memory."""
        seq = claim.ref.segment_seq
        if seq in self._warm:
            return self._core.read(claim)
        try:
            bundle = await self._run(lambda: self._core.read(claim))
        except BaseException:
            # Nobody gets the bundle. If the read goes on, what it makes of the claim comes too late.
            self._core.deliveries.abandon(claim)
            raise
        self._warm.append(seq)
        return bundle

    async def claim(self, subscriber: str, ref: BundleRef) -> Bundle:
        """As `Quiver.claim`."""
        return await self._run(lambda: self._quiver.claim(subscriber, ref))

    async def ack_segment(self, subscriber: str, segment_seq: int) -> bool:
        """As `Quiver.ack_segment`."""
        return self._quiver.ack_segment(subscriber, segment_seq)

    async def register(self, name: str, start: str | int = "earliest") -> Subscriber:
        """As `Quiver.register`."""
        return await self._run(lambda: self._quiver.register(name, start))

    async def activate(self, name: str) -> None:
        """As `Quiver.activate`."""
        self._quiver.activate(name)

    async def deactivate(self, name: str) -> None:
        """As `Quiver.deactivate`."""
        self._quiver.deactivate(name)

    async def unregister(self, name: str) -> Subscriber:
        """As `Quiver.unregister`."""
        return await self._run(lambda: self._quiver.unregister(name))

    async def orphans(self, configured: Iterable[str]) -> list[str]:
        """As `Quiver.orphans`."""
        return self._quiver.orphans(configured)

    def subscribers(self) -> list[Subscriber]:
        """As `Quiver.subscribers`."""
        return self._quiver.subscribers()

    def scan(
        self,
        *,
        signal: Signal | str | None = None,
        slot: int | None = None,
        since: Instant | None = None,
        until: Instant | None = None,
    ) -> ds.Dataset:
        """As `Quiver.scan`."""
        return self._quiver.scan(signal=signal, slot=slot, since=since, until=until)

    async def flush(self) -> None:
        """As `Quiver.flush`."""
        await self._run(self._quiver.flush)

    async def maintain(self) -> None:
        """As `Quiver.maintain`."""
        await self._run(self._quiver.maintain)

    def stats(self) -> QuiverStats:
        """As `Quiver.stats`."""
        return self._quiver.stats()

    async def close(self) -> None:
        """As `Quiver.close`."""
        await self._run(self._quiver.close)

    async def __aenter__(self) -> AsyncQuiver:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.to_thread(call)


def _answer(answer: asyncio.Future[Receipt], receipt: Receipt | None, error: PenstockError | None) -> None:
    if answer.done():
        return
    if receipt is not None:
        answer.set_result(receipt)
    else:
        answer.set_exception(error or Unavailable("the bundle was not accepted"))
