"""An object store that injects the faults of real stores."""

from __future__ import annotations

import asyncio
import builtins
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.clock import Clock
from penstock.errors import Conflict, NotFound, OutcomeUnknown, PenstockError, Unavailable
from penstock.objects import Blob, ByteRange, Data, ObjectInfo, ObjectStore, Version
from penstock.testing.fault_plan import DEFAULT_RATES, FAULTS_OF, FaultKind, FaultPlan, StoreCall, StoreOp

__all__ = [
    "DEFAULT_RATES",
    "FAULTS_OF",
    "FaultKind",
    "FaultPlan",
    "FaultyStore",
    "ListingJournal",
    "StoreCall",
    "StoreOp",
]

_T = TypeVar("_T")
_JOURNAL_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Change:
    at_s: float
    key: str
    before: ObjectInfo | None


class ListingJournal:
    """Recent changes of a bucket, for outdated listings.

    Pass one journal to all `FaultyStore`s of the same bucket, so that each can miss the writes of the others.
    """

    def __init__(self) -> None:
        self._changes: deque[_Change] = deque(maxlen=_JOURNAL_MAX)

    def note(self, key: str, *, at_s: float, before: ObjectInfo | None) -> None:
        """Record that `key` changed at `at_s`. `before` is its previous entry in a listing."""
        self._changes.append(_Change(at_s, key, before))

    def rewind(self, listing: Iterable[ObjectInfo], prefix: str, *, since_s: float) -> list[ObjectInfo]:
        """Return the listing as it was at `since_s`."""
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        found = {info.key: info for info in listing}
        for change in reversed(self._changes):
            if change.at_s <= since_s or not change.key.startswith(folder):
                continue
            if change.before is None:
                found.pop(change.key, None)
            else:
                found[change.key] = change.before
        return [found[key] for key in sorted(found)]


class FaultyStore:
    """Wraps an `ObjectStore`, and adds the latency and the fault that its `FaultPlan` decides to every call.

    The same calls in the same order with the same `rng` have the same results. A background task of the
    running loop does a late write. `settle` waits for these tasks. Errors of `inner` pass through unchanged.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        clock: Clock,
        rng: random.Random,
        plan: FaultPlan,
        journal: ListingJournal | None = None,
    ) -> None:
        self.inner = inner
        self.plan = plan
        self.late_won = 0
        self.late_lost = 0
        self._clock = clock
        self._rng = rng
        self._journal = journal or ListingJournal()
        self._journals = journal is not None or plan.may(FaultKind.STALE_LIST)
        self._under_way: dict[asyncio.Task[None], None] = {}

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def calls(self) -> builtins.list[StoreCall]:
        """The plan's log of calls: (index, op, key)."""
        return self.plan.calls

    @property
    def injected(self) -> Counter[FaultKind]:
        """The number of faults of each kind that the plan has injected."""
        return self.plan.injected

    @property
    def under_way(self) -> int:
        """The number of late writes that have not reached the store yet."""
        return len(self._under_way)

    async def settle(self) -> None:
        """Wait until every late write has reached the store."""
        while self._under_way:
            await asyncio.gather(*self._under_way)

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        blob, fault = await self._read("get", key, lambda: self.inner.get(key, byte_range))
        return self._truncated(blob) if fault is FaultKind.TRUNCATED else blob

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        blob, fault = await self._read("get_if_changed", key, lambda: self.inner.get_if_changed(key, version))
        return self._truncated(blob) if blob is not None and fault is FaultKind.TRUNCATED else blob

    async def head(self, key: str) -> ObjectInfo:
        info, _ = await self._read("head", key, lambda: self.inner.head(key))
        return info

    async def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        listing, fault = await self._read("list", prefix, lambda: self.inner.list(prefix))
        if fault is not FaultKind.STALE_LIST:
            return listing
        lag_s = self.plan.stale_window_s * (1.0 - self._rng.random())
        return self._journal.rewind(listing, prefix, since_s=self._clock.monotonic() - lag_s)

    async def put(self, key: str, data: Data) -> Version:
        frozen = _frozen(data)
        return await self._write("put", [key], lambda: self.inner.put(key, frozen), lost=Unavailable)

    async def put_if_absent(self, key: str, data: Data) -> Version:
        frozen = _frozen(data)
        return await self._write(
            "put_if_absent", [key], lambda: self.inner.put_if_absent(key, frozen), lost=OutcomeUnknown
        )

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        frozen = _frozen(data)
        return await self._write(
            "put_if_match", [key], lambda: self.inner.put_if_match(key, frozen, version), lost=OutcomeUnknown
        )

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        listed = [*keys]
        try:
            return await self._write(
                "delete_many", listed, lambda: self.inner.delete_many(listed), lost=Unavailable
            )
        except Unavailable as error:
            return dict.fromkeys(listed, error)

    async def close(self) -> None:
        """Cancel the late writes, then close `inner`."""
        pending = [*self._under_way]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self.inner.close()

    async def _read(
        self, op: StoreOp, key: str, apply: Callable[[], Awaitable[_T]]
    ) -> tuple[_T, FaultKind | None]:
        fault = self.plan.draw(op, key, self._rng)
        before_s, after_s = self._draw_waits(fault)
        await self._wait(before_s)
        if fault in (FaultKind.FAILED_BEFORE, FaultKind.THROTTLED, FaultKind.CUT_SHORT):
            raise _error(Unavailable, fault, op, key)
        result = await apply()
        await self._wait(after_s)
        return result, fault

    async def _write(
        self,
        op: StoreOp,
        keys: builtins.list[str],
        apply: Callable[[], Awaitable[_T]],
        *,
        lost: type[PenstockError],
    ) -> _T:
        key = keys[0] if keys else ""
        fault = self.plan.draw(op, key, self._rng)
        before_s, after_s = self._draw_waits(fault)
        if fault is FaultKind.LATE_LANDING:
            self._deliver_later(keys, apply)
            raise _error(lost, fault, op, key)
        await self._wait_or_leave_under_way(before_s, keys, apply)
        if fault is FaultKind.REFUSED:
            raise _error(Unavailable, fault, op, key)
        if fault is FaultKind.NOT_DECIDED:
            raise _error(Conflict, fault, op, key)
        if fault in (FaultKind.FAILED_BEFORE, FaultKind.THROTTLED):
            raise _error(lost, fault, op, key)
        result = await self._applied(keys, apply, hide=lost if fault is FaultKind.APPLIED_THEN_LOST else None)
        await self._wait(after_s)
        if fault is FaultKind.APPLIED_THEN_LOST:
            raise _error(lost, fault, op, key)
        if fault is FaultKind.OWN_CONFLICT:
            raise _error(Conflict, fault, op, key)
        return result

    async def _applied(
        self,
        keys: builtins.list[str],
        apply: Callable[[], Awaitable[_T]],
        *,
        hide: type[PenstockError] | None = None,
    ) -> _T:
        """Pass the write to `inner`, and record the previous entries of a listing."""
        before = [(key, await self._info(key)) for key in keys] if self._journals else []
        try:
            result = await apply()
        except Conflict as conflict:
            # A lost response hides an error as well as a success.
            if hide is not None:
                raise hide("the response to the write was lost") from conflict
            raise
        for key, info in before:
            self._journal.note(key, at_s=self._clock.monotonic(), before=info)
        return result

    async def _info(self, key: str) -> ObjectInfo | None:
        try:
            return await self.inner.head(key)
        except NotFound:
            return None

    def _draw_waits(self, fault: FaultKind | None) -> tuple[float, float]:
        """Draw the delays in seconds before and after the call is applied."""
        least_s, most_s = self.plan.latency_s
        before_s = after_s = 0.0
        if most_s > 0:
            total_s = self._rng.uniform(least_s, most_s)
            before_s = total_s * self._rng.random()
            after_s = total_s - before_s
        if fault is FaultKind.STALL_BEFORE:
            before_s += self._rng.uniform(*self.plan.stall_s)
        if fault is FaultKind.STALL_AFTER:
            after_s += self._rng.uniform(*self.plan.stall_s)
        return before_s, after_s

    async def _wait(self, seconds: float) -> None:
        if seconds > 0:
            await self._clock.sleep(seconds)

    async def _wait_or_leave_under_way(
        self, seconds: float, keys: builtins.list[str], apply: Callable[[], Awaitable[object]]
    ) -> None:
        """Wait. If the caller is cancelled during the wait, its request may already have been sent."""
        try:
            await self._wait(seconds)
        except asyncio.CancelledError:
            if self.plan.cancelled_lands > 0 and self._rng.random() < self.plan.cancelled_lands:
                self._deliver_later(keys, apply)
            raise

    def _deliver_later(self, keys: builtins.list[str], apply: Callable[[], Awaitable[object]]) -> None:
        delay_s = self._rng.uniform(*self.plan.late_s)
        task = asyncio.get_running_loop().create_task(
            self._land(delay_s, keys, apply), name=f"late write of {keys[0] if keys else ''}"
        )
        self._under_way[task] = None
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)

    async def _land(
        self, delay_s: float, keys: builtins.list[str], apply: Callable[[], Awaitable[object]]
    ) -> None:
        await self._clock.sleep(delay_s)
        try:
            await self._applied(keys, apply)
        except PenstockError:
            self.late_lost += 1
        else:
            self.late_won += 1

    def _truncated(self, blob: Blob) -> Blob:
        kept = self._rng.randrange(len(blob.data)) if len(blob.data) else 0
        return replace(blob, data=blob.data[:kept])


def _frozen(data: Data) -> bytes:
    """Copy the bytes, so that a late write does not see later changes of the caller's buffers."""
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    return b"".join(data)


def _error(kind: type[PenstockError], fault: FaultKind, op: StoreOp, key: str) -> PenstockError:
    return kind(f"injected fault {fault.value}: {op} {key}")
