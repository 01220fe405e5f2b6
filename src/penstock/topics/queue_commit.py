"""Changes of a queue on their way through the log: in order, durable as the topic's class says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from penstock.errors import PenstockError
from penstock.storage import Entry, LogPosition
from penstock.topics.lease_log import state_frame
from penstock.topics.submission import commit_error
from penstock.topics.topic import Topic

__all__ = ["commit", "log_leases", "sync"]

_FRAMES_MAX: Final = 1000


def _nothing() -> None:
    pass


class _Decision:
    """`apply` is called when the frames are committed, `undo` when they are not, whoever still waits."""

    __slots__ = ("_apply", "_undo", "outcome")

    def __init__(self, apply: Callable[[], None], undo: Callable[[], None]) -> None:
        self._apply = apply
        self._undo = undo
        self.outcome: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def committed(self, entry: Entry, position: LogPosition) -> None:
        self._apply()
        if not self.outcome.done():
            self.outcome.set_result(entry.sync_s * 1000)

    def failed(self, error: PenstockError) -> None:
        self._undo()
        if not self.outcome.done():
            self.outcome.set_exception(commit_error(error))


def commit(
    topic: Topic,
    frames: Sequence[bytes],
    *,
    apply: Callable[[], None] = _nothing,
    undo: Callable[[], None] = _nothing,
    sync: bool | None = None,
    urgent: bool = False,
) -> asyncio.Future[float]:
    """Send frames into the topic's log; `shard.check_room` comes before. How long the sync took, in ms.

    Without `sync` the topic's class decides whether it is waited for.
    """
    all_frames = [*topic.moved_floors(), *frames]
    decision = _Decision(apply, undo)
    topic.shard.submit(
        all_frames,
        frames=len(all_frames),
        sync=topic.config.durable if sync is None else sync,
        waiting=decision,
        urgent=urgent,
    )
    return decision.outcome


def log_leases(topic: Topic, now_ms: int) -> list[asyncio.Future[float]]:
    """Tell the log of every lease, delay and delivery of a queue: from now on they outlive the process."""
    assert topic.leases is not None
    jobs = topic.leases.entry(with_leases=True, ahead_ms=topic.wall_ahead_ms()).jobs
    frames = [state_frame(topic.id, job, ts_ms=now_ms) for job in jobs]
    parts = [frames[at : at + _FRAMES_MAX] for at in range(0, len(frames), _FRAMES_MAX)]
    logged = [commit(topic, part, urgent=True) for part in parts]
    for outcome in logged:
        outcome.add_done_callback(_look_at)  # whoever asked may have gone
    return logged


def _look_at(outcome: asyncio.Future[float]) -> None:
    if not outcome.cancelled():
        outcome.exception()


def sync(topic: Topic) -> asyncio.Future[float]:
    """Done when everything that was written to the topic is durable."""
    decision = _Decision(_nothing, _nothing)
    topic.shard.submit([], frames=0, sync=True, waiting=decision)
    return decision.outcome
