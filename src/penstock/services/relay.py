"""A topic relayed into a queue: each record once, whatever dies in between.

1. The queue knows how far it is: every batch of the relay is appended under (application, last sequence), see
   `penstock.buffer.transactions`. So batch and position become durable in the same write.
2. A relay that starts looks there and reads on behind it. There is no other state.
3. Each append demands that the queue still stands where the relay goes on from. So an attempt whose answer
   was lost is recognised, and of two relays that run at the same time one is refused.
4. A record that decoders may refuse, which an earlier version took, is set aside as a dead letter beside the
   queue, durably, before the batch that passes it; its place is logged.
5. Records that the topic has evicted are a gap, and `on_gap` says what becomes of it.

While one batch is stored, the next is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from penstock import errors
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG
from penstock.retry import Backoff, RetryPolicy
from penstock.services.relay_config import RelayConfig, Start
from penstock.services.relay_draft import Draft, Gap, Identity, changed
from penstock.services.relay_errors import RelayGap, TopicChanged
from penstock.services.relay_target import RelayTarget, open_target
from penstock.topics import (
    BATCH_BYTES_MAX,
    DIFF_LIMIT_MAX,
    WAIT_MS_MAX,
    Client,
    Durability,
    Page,
    TopicState,
    unreadable,
)

__all__ = ["Relay", "RelayReport"]

T = TypeVar("T")

_PASSING = (errors.Unavailable, errors.Conflict, errors.OutcomeUnknown)
_LOGGER = logging.getLogger(__name__)
_GAPS_KEPT = 100
"""Gaps that a report lists; it counts the records of all."""


@dataclass(slots=True, kw_only=True)
class RelayReport:
    """What one run has done. `through` is the last sequence that the queue has, or that was passed over."""

    topic: str
    app: str
    through: int = 0
    head: int = 0
    """The end of the topic when it was last asked."""
    records: int = 0
    record_bytes: int = 0
    batches: int = 0
    missed: int = 0
    """Records that were gone."""
    gaps: list[Gap] = field(default_factory=list)
    """The first of the gaps."""
    unreadable: int = 0
    """Records that were set aside as dead letters beside the queue."""

    @property
    def lag(self) -> int:
        return max(0, self.head - self.through)

    def add(self, draft: Draft) -> None:
        self.through = draft.through
        self.records += draft.count
        self.record_bytes += draft.record_bytes
        self.batches += 1 if draft.count else 0
        self.unreadable += len(draft.letters)
        self.missed += sum(gap.missed for gap in draft.gaps)
        self.gaps += draft.gaps[: _GAPS_KEPT - len(self.gaps)]


class Relay:
    """Moves the records of one topic into one queue. `client` stays the caller's."""

    def __init__(
        self,
        client: Client,
        config: RelayConfig,
        *,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        on_progress: Callable[[RelayReport], None] | None = None,
    ) -> None:
        self._client = client
        self._config = config
        self._clock = clock
        self._rng = rng
        self._on_progress = on_progress or (lambda report: None)
        self._stop = asyncio.Event()
        self._last: Identity | None = None
        self._unsettled: Draft | None = None
        self.report = RelayReport(topic=config.topic, app=config.name)

    def stop(self) -> None:
        """End after the batch that is under way."""
        self._stop.set()

    async def run(self, *, once: bool = False) -> RelayReport:
        """Relay for ever, or with `once` up to what the topic has now; `stop` ends it after a batch.

        Faults that pass are waited out for `retry_for`, each time from what the queue says. Raises
        `RelayGap`, `RelayTaken`, `TopicChanged`, and what the server and the store raise.
        """
        policy = RetryPolicy(floor_s=0.1, ceiling_s=5.0, deadline_s=self._config.retry_for_s)
        backoff = Backoff(policy, clock=self._clock, rng=self._rng)
        batches, end = self.report.batches, None
        while True:
            try:
                async with open_target(
                    self._config.queue, self._config.name, clock=self._clock, rng=self._rng
                ) as target:
                    state = await self._unless_stopped(self._state())
                    if state is None:
                        return self.report
                    end = state.head_seq if once and end is None else end
                    await self._relay(target, state, end)
                return self.report
            except _PASSING:
                if self.report.batches > batches:
                    batches, backoff = self.report.batches, Backoff(policy, clock=self._clock, rng=self._rng)
                if not await self._unless_stopped(backoff.pause()):
                    raise

    async def _state(self) -> TopicState:
        state = await self._client.state(self._config.topic, touch=False)
        if state.config.durability in (Durability.EPHEMERAL, Durability.MEMORY):
            raise errors.Unsupported(
                f"{self._config.topic} has the durability {state.config.durability.value}: after a crash its "
                "sequences may be given to other records, so nobody can tell what was relayed. Make it disk "
                "or fsync"
            )
        return state

    async def _relay(self, target: RelayTarget, state: TopicState, end: int | None) -> None:
        position = await target.position(self._config.topic)
        committed = position.seq
        self._settle(committed)
        after = _start(self._config.start, state) if committed is None else committed
        self._check_reached(after, state, begun=committed is not None)
        await self._unless_stopped(self._check_identity(self._known(after, position.last)))
        if self._stop.is_set():
            return
        self.report.through, self.report.head = after, state.head_seq
        self._on_progress(self.report)
        reading = asyncio.create_task(self._gather(after, end))
        try:
            while (draft := await reading) is not None:
                reading = asyncio.create_task(self._gather(draft.through, end))
                for bad, text in draft.letters:
                    key = await target.set_aside(draft.topic, bad, text)
                    _LOGGER.warning(
                        "record %d of %s %s and is not relayed; it is in %s",
                        bad.seq,
                        draft.topic,
                        bad.reason,
                        key,
                    )
                if draft.count:
                    self._unsettled = draft
                    await target.append(draft, committed)
                    committed = draft.through
                    self._settle(committed)
                else:
                    self.report.add(draft)
                self._on_progress(self.report)
        finally:
            await _end(reading)

    def _settle(self, committed: int | None) -> None:
        """Count the last batch if it is in the queue, also when its answer was lost."""
        draft, self._unsettled = self._unsettled, None
        if draft is not None and draft.through == committed:
            self.report.add(draft)
            self._last = draft.last or self._last

    def _known(self, after: int, stored: Identity | None) -> Identity | None:
        """The record that ought to be the topic's at the position, from the queue or from this run."""
        candidates = (stored, self._last)
        return next((known for known in candidates if known is not None and known.seq <= after), None)

    def _check_reached(self, after: int, state: TopicState, *, begun: bool) -> None:
        if after <= state.head_seq:
            return
        if not begun:
            raise errors.InvalidInput(
                f"start: {state.topic} ends at {state.head_seq}, and {after} is behind it"
            )
        raise TopicChanged(changed(state.topic, after, state.head_seq))

    async def _check_identity(self, known: Identity | None) -> None:
        """Raise `TopicChanged` if another record has the number of `known`; one that is gone says nothing."""
        if known is None:
            return
        page = await self._client.diff(self._config.topic, known.seq - 1, limit=1, include_meta=False)
        readable = page.fragments and page.tombstone is None and unreadable(page.fragments[0]) is None
        found = page.records()[0] if readable else None
        if found is not None and found.seq == known.seq and found.ts_ms != known.ts_ms:
            raise TopicChanged(
                f"record {known.seq} of {self._config.topic}, the last that was relayed, is another one now: "
                "the topic was removed and made anew, or set back. Relay it under another name (app) to "
                "begin again"
            )

    async def _gather(self, after: int, end: int | None) -> Draft | None:
        """The next batch: a full one, or all there is, `flush_interval` after its first record.

        None: there is no more to do.
        """
        queue = self._config.queue
        draft = self._draft(after)
        waited = end is not None
        while draft.record_bytes < queue.flush_size and (end is None or draft.through < end):
            wait_ms = 0 if waited or draft.count else WAIT_MS_MAX
            page = await self._unless_stopped(self._diff(draft.through, wait_ms))
            if page is None or not self._add(draft, page):
                break
            if not page.caught_up:
                continue
            if waited or (draft.through > after and not draft.count):
                break
            if draft.count:
                await self._unless_stopped(self._clock.sleep(queue.flush_interval_s))
                waited = True
        return draft if draft.through > after else None

    def _draft(self, after: int) -> Draft:
        config = self._config
        return Draft(topic=config.topic, after=after, value=config.value, on_gap=config.on_gap)

    def _add(self, draft: Draft, page: Page) -> bool:
        """Take a page; False if what is wrong with it has to wait until the records before it are safe."""
        self.report.head = page.head_seq
        try:
            draft.add(page)
        except (RelayGap, TopicChanged):
            if not draft.count:
                raise
            return False
        return True

    async def _diff(self, from_seq: int, wait_ms: int) -> Page:
        return await self._client.diff(
            self._config.topic,
            from_seq,
            limit=DIFF_LIMIT_MAX,
            include_tags=True,
            wait_ms=wait_ms,
            max_batch_bytes=BATCH_BYTES_MAX,
        )

    async def _unless_stopped(self, work: Coroutine[None, None, T]) -> T | None:
        """What `work` returns; None as soon as the relay is asked to stop, and `work` is given up."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else None
        finally:
            await _end(working)
            await _end(stopping)


async def _end(task: asyncio.Task[T]) -> None:
    """Cancel a task whose outcome nobody needs, and wait until it is over."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, errors.PenstockError):
        await task


def _start(start: Start, state: TopicState) -> int:
    if isinstance(start, int):
        return start
    return state.earliest_seq - 1 if start == "earliest" else state.head_seq
