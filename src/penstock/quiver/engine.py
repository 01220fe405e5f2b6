"""A durable buffer of Arrow batches in one directory: each is stored once and delivered to every subscriber.

`Quiver` is for threads. `AsyncQuiver` is the same engine for an event loop and needs no thread per call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Corrupt, InvalidInput, PenstockError, Unavailable
from penstock.ids import SYSTEM_RNG
from penstock.metrics import DEFAULT_REGISTRY, Registry
from penstock.quiver.append import Batches, EncodedBundle, Receipt, encode_bundle, raw_batch
from penstock.quiver.config import QuiverConfig
from penstock.quiver.core import Core, QuiverStats, Runtime
from penstock.quiver.delivery.leases import Bundle, Lease
from penstock.quiver.errors import AtCapacity, Closed, Locked
from penstock.quiver.model import BundleRef, Signal, raw_slot
from penstock.quiver.offsets.state import Subscriber
from penstock.quiver.tools.dataset import Instant, scan_segments, select
from penstock.storage import VOLATILE, DirectoryLock, FileSystem, LockHeld, OsFileSystem, device_kind
from penstock.units import DurationLike, parse_duration

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_LOGGER = logging.getLogger(__name__)
T = TypeVar("T")
_WARM_SEGMENTS: Final = 16
_WAIT_FIRST_S: Final = 0.01
_WAIT_MAX_S: Final = 0.16


class Quiver:
    """One core of a Quiver directory, open for this process only. Any thread may call any method.

    Once `ingest` has returned, the data is as durable as the flush policy promises and is delivered to every
    subscriber at least once. It is deleted when every subscriber has resolved it, or by retention.
    """

    def __init__(self, core: Core, lock: contextlib.ExitStack) -> None:
        self._core = core
        self._lock = lock
        self._closing = threading.Lock()
        self._is_closed = False

    @classmethod
    def open(
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
        threads: bool = True,
    ) -> Quiver:
        """Recover and open `core_<core_id>` below `path`, which is created if it is missing.

        Each of `cores` processes owns one core and its share of the size cap. Without `maintenance`, periodic
        work happens only when `maintain` is called. Without `threads`, all work happens within the calls.
        Raise `Locked` if another process has the directory open, `ConfigError`, `Unsupported`, and errors of
        the disk.
        """
        config = config if config is not None else QuiverConfig()
        config = config if path is None else config.with_path(os.fspath(path))
        if not 0 <= core_id < cores:
            raise InvalidInput(f"core_id must be from 0 to {cores - 1}, not {core_id}")
        config.cap_per_core(cores)
        fs = fs if fs is not None else OsFileSystem()
        directory = os.path.join(os.path.abspath(config.path), f"core_{core_id}")
        with contextlib.ExitStack() as stack:
            _lock_directory(stack, fs, directory)
            _warn_of_memory(fs, directory)
            runtime = Runtime(
                fs=fs, clock=clock, rng=rng, registry=registry, threads=threads, maintenance=maintenance
            )
            core = Core(directory, config, runtime, core_id=core_id, cores=cores)
            return cls(core, stack.pop_all())

    # ---- ingest --------------------------------------------------------------------------------------

    def ingest(
        self, data: Batches, *, signal: Signal | str | None = None, slot: int | None = None
    ) -> Receipt:
        """Accept a batch, or one batch for each of several slots, and return when it is durable.

        A single batch goes into `slot`, or into the flat slot of its `signal`; without either it is not
        treated as telemetry. Each slot's batch is delivered as a separate bundle. Raise `AtCapacity` if a cap
        is reached and nothing may be deleted, `InvalidInput`, `LimitExceeded`, `Closed`, and errors of the
        disk. After an error the batch is not accepted, although it may reappear if the machine stops at that
        moment.
        """
        self.check_open()
        return self._accept(encode_bundle(data, signal=signal, slot=slot))

    def _accept(self, bundle: EncodedBundle) -> Receipt:
        answer = _Answer()
        self._core.admission.admit(bundle.byte_count)
        try:
            self._core.appender.append(bundle, answer.settle)
        finally:
            self._core.admission.release(bundle.byte_count)
        return answer.wait()

    def ingest_raw(self, data: bytes, signal: Signal | str) -> Receipt:
        """Accept an unmodified request without decoding it. Raise as `ingest`."""
        return self.ingest(raw_batch(data), slot=raw_slot(Signal(signal)))

    # ---- subscribers ---------------------------------------------------------------------------------

    def register(self, name: str, start: str | int = "earliest") -> Subscriber:
        """Register a subscriber durably. A registered one keeps its position.

        A new one starts at the earliest existing data, with data that arrives from now on ("latest"), or at a
        segment number.
        """
        self.check_open()
        return self._core.offsets.register(name, start)

    def activate(self, name: str) -> None:
        """Start delivering bundles to a subscriber. Raise `UnknownSubscriber`."""
        self.check_open()
        self._core.offsets.activate(name)

    def deactivate(self, name: str) -> None:
        """Stop delivering bundles to a subscriber until it is activated again. Its data is kept."""
        self.check_open()
        self._core.offsets.deactivate(name)

    def unregister(self, name: str) -> Subscriber:
        """Remove a subscriber durably and stop keeping data for it. Return its last state."""
        self.check_open()
        return self._core.deliveries.unregister(name)

    def subscribers(self) -> list[Subscriber]:
        """Return all subscribers, by name."""
        return self._core.deliveries.subscribers()

    def orphans(self, configured: Iterable[str]) -> list[str]:
        """Mark the subscribers that are not in `configured` as orphaned and return their names.

        Their data is kept.
        """
        self.check_open()
        return self._core.offsets.orphans(configured)

    # ---- delivery ------------------------------------------------------------------------------------

    def next_bundle(self, subscriber: str, timeout: DurationLike | None = 0) -> Bundle | None:
        """Claim the next bundle for a subscriber. Return None if none arrives within `timeout`.

        A `timeout` of None waits until there is a bundle or Quiver is closed. Raise `UnknownSubscriber`.
        """
        timeout_s = None if timeout is None else parse_duration(timeout)
        while True:
            self.check_open()
            claim = self._core.deliveries.take(subscriber, timeout_s)
            if claim is None:
                return None
            bundle = self._core.read(claim)
            if bundle is not None:
                return bundle

    def claim(self, subscriber: str, ref: BundleRef) -> Bundle:
        """Claim a specific bundle out of order.

        Raise `StaleClaim` if it cannot be claimed, and `Corrupt`.
        """
        self.check_open()
        bundle = self._core.read(self._core.deliveries.claim(subscriber, ref))
        if bundle is None:
            raise Corrupt(f"bundle {ref.bundle} of segment {ref.segment_seq} cannot be read")
        return bundle

    def ack_segment(self, subscriber: str, segment_seq: int) -> bool:
        """Acknowledge every bundle of a segment. Return False if all were already resolved."""
        self.check_open()
        return self._core.deliveries.ack_segment(subscriber, segment_seq)

    def scan(
        self,
        *,
        signal: Signal | str | None = None,
        slot: int | None = None,
        since: Instant | None = None,
        until: Instant | None = None,
    ) -> ds.Dataset:
        """Return the committed segments of one signal or slot as a dataset, from `since` up to `until`.

        It does not include open segments; call `flush` first to include them. Reading the dataset fails if
        one of its segments has been deleted.
        """
        self.check_open()
        kind = None if signal is None else Signal(signal)
        store = self._core.store
        chosen = select(store.infos(), signal=kind, slot=slot, since=since, until=until)
        return scan_segments([(info, store.path(info.seq)) for info in chosen], since=since, until=until)

    # ---- maintenance ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Return when everything accepted so far is in segments and ready for delivery."""
        self.check_open()
        with self._core.guard.at_work():
            self._core.flusher.flush()

    def maintain(self) -> None:
        """Do all due work now: seal, redeliver, sync, delete. Raise errors of the disk."""
        self.check_open()
        self._core.maintenance.run()

    def stats(self) -> QuiverStats:
        """Return counts and sizes of all parts."""
        return self._core.stats()

    @property
    def core(self) -> Core:
        """The components, for code that builds on them."""
        return self._core

    def close(self) -> None:
        """Write open segments, checkpoint, and release the directory. May be called twice.

        Raise errors of the disk. In that case accepted data is in the log, and the directory is released.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        with self._lock:
            self._core.close()

    def check_open(self) -> None:
        """Raise `Closed` if this Quiver is closed."""
        if self._is_closed:
            raise Closed("this Quiver is closed; open it again")

    def __enter__(self) -> Quiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Answer:
    """The result of one append, for the thread that waits for it."""

    __slots__ = ("_error", "_given", "_receipt")

    def __init__(self) -> None:
        self._given = threading.Lock()
        self._given.acquire()
        self._receipt: Receipt | None = None
        self._error: PenstockError | None = None

    def settle(self, receipt: Receipt | None, error: PenstockError | None) -> None:
        self._receipt, self._error = receipt, error
        self._given.release()

    def wait(self) -> Receipt:
        self._given.acquire()
        if self._receipt is None:
            raise self._error or Unavailable("the bundle was not accepted")
        return self._receipt


def _lock_directory(stack: contextlib.ExitStack, fs: FileSystem, directory: str) -> None:
    try:
        stack.enter_context(DirectoryLock(fs, directory))
    except LockHeld as error:
        raise Locked(str(error)) from error


def _warn_of_memory(fs: FileSystem, directory: str) -> None:
    if isinstance(fs, OsFileSystem) and device_kind(directory) in VOLATILE:
        _LOGGER.warning("%s is in memory: all data is lost when the machine restarts; use a disk", directory)


class AsyncQuiver:
    """A `Quiver` whose calls do not block the event loop.

    `ingest` and `next_bundle` wait without a thread. Rare calls that access the disk run on the default
    executor. `bundle.ack()`, `nack()`, `reject()` and `defer()` never wait and are plain calls.
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
        """See `Quiver.open`."""

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
        """The blocking engine."""
        return self._quiver

    async def ingest(
        self, data: Batches, *, signal: Signal | str | None = None, slot: int | None = None
    ) -> Receipt:
        """See `Quiver.ingest`. After a cancellation it is unknown whether the bundle was accepted."""
        self._quiver.check_open()
        return await self._accept(encode_bundle(data, signal=signal, slot=slot))

    async def ingest_raw(self, data: bytes, signal: Signal | str) -> Receipt:
        """See `Quiver.ingest_raw`."""
        return await self.ingest(raw_batch(data), slot=raw_slot(Signal(signal)))

    async def _accept(self, bundle: EncodedBundle) -> Receipt:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Receipt] = loop.create_future()

        def settle(receipt: Receipt | None, error: PenstockError | None) -> None:
            try:
                loop.call_soon_threadsafe(_answer, answer, receipt, error)
            except RuntimeError:
                return  # the loop is closed, so nothing is waiting

        await self._reserve_space(bundle.byte_count)
        try:
            self._core.appender.append(bundle, settle)
        finally:
            self._core.admission.release(bundle.byte_count)
        return await answer

    async def _reserve_space(self, byte_count: int) -> None:
        """Reserve space for a bundle by waiting on the loop, because threads are few and readers need them.

        The space is reserved here, not on a thread, because a cancelled task never sees a thread's result.
        """
        admission, clock = self._core.admission, self._core.clock
        deadline_s = clock.monotonic() + self._core.config.ingest.block_s
        wait_s = _WAIT_FIRST_S
        while not admission.reserve(byte_count):
            try:
                await self._run(lambda: admission.wait_for_quota(byte_count))
            except AtCapacity:
                if clock.monotonic() >= deadline_s:
                    raise
                await clock.sleep(wait_s)
                wait_s = min(2 * wait_s, _WAIT_MAX_S)
                self._quiver.check_open()

    async def next_bundle(self, subscriber: str, timeout: DurationLike | None = 0) -> Bundle | None:
        """See `Quiver.next_bundle`."""
        timeout_s = None if timeout is None else parse_duration(timeout)
        while True:
            self._quiver.check_open()
            claim = await self._core.deliveries.take_async(subscriber, timeout_s)
            if claim is None:
                return None
            bundle = await self._read(claim)
            if bundle is not None:
                return bundle

    async def _read(self, claim: Lease) -> Bundle | None:
        """Read a bundle.

        The first read of a segment may read all of its bytes. Later ones only access memory.
        """
        seq = claim.ref.segment_seq
        if seq in self._warm:
            return self._core.read(claim)
        try:
            bundle = await self._run(lambda: self._core.read(claim))
        except BaseException:
            # The caller does not get the bundle. A read that continues finds the claim ended.
            self._core.deliveries.abandon(claim)
            raise
        self._warm.append(seq)
        return bundle

    async def claim(self, subscriber: str, ref: BundleRef) -> Bundle:
        """See `Quiver.claim`."""
        return await self._run(lambda: self._quiver.claim(subscriber, ref))

    async def ack_segment(self, subscriber: str, segment_seq: int) -> bool:
        """See `Quiver.ack_segment`."""
        return self._quiver.ack_segment(subscriber, segment_seq)

    async def register(self, name: str, start: str | int = "earliest") -> Subscriber:
        """See `Quiver.register`."""
        return await self._run(lambda: self._quiver.register(name, start))

    async def activate(self, name: str) -> None:
        """See `Quiver.activate`."""
        self._quiver.activate(name)

    async def deactivate(self, name: str) -> None:
        """See `Quiver.deactivate`."""
        self._quiver.deactivate(name)

    async def unregister(self, name: str) -> Subscriber:
        """See `Quiver.unregister`."""
        return await self._run(lambda: self._quiver.unregister(name))

    async def orphans(self, configured: Iterable[str]) -> list[str]:
        """See `Quiver.orphans`."""
        return self._quiver.orphans(configured)

    def subscribers(self) -> list[Subscriber]:
        """See `Quiver.subscribers`."""
        return self._quiver.subscribers()

    def scan(
        self,
        *,
        signal: Signal | str | None = None,
        slot: int | None = None,
        since: Instant | None = None,
        until: Instant | None = None,
    ) -> ds.Dataset:
        """See `Quiver.scan`."""
        return self._quiver.scan(signal=signal, slot=slot, since=since, until=until)

    async def flush(self) -> None:
        """See `Quiver.flush`."""
        await self._run(self._quiver.flush)

    async def maintain(self) -> None:
        """See `Quiver.maintain`."""
        await self._run(self._quiver.maintain)

    def stats(self) -> QuiverStats:
        """See `Quiver.stats`."""
        return self._quiver.stats()

    async def close(self) -> None:
        """See `Quiver.close`."""
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
