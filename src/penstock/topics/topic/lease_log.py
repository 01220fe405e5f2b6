"""Leases in the log: their frames, and the commits that make changes of a queue durable.

There is one frame per job and event, with the job's sequence number in the frame's header:

    event u8 | lease_id u64 | until u64 | deliveries u64 | node_len u32 | node

Claims, releases, extensions and acks are written only for queues whose leases outlive the process. The count
of dead letters and the used lease numbers are written for every queue. Changes of one queue commit in order,
with the durability of the topic.
"""

from __future__ import annotations

import asyncio
import struct
from enum import IntEnum
from typing import Final

from penstock.errors import Corrupt
from penstock.storage import Buffer
from penstock.topics.log.frame import FrameType, encode_control
from penstock.topics.topic.leases import JobState, LeaseTable
from penstock.topics.topic.topic import Topic

_BODY = struct.Struct("<BQQQI")


class LeaseEvent(IntEnum):
    CLAIMED = 0
    RELEASED = 1
    """`until` is the time at which the job is ready again; 0 means immediately."""
    EXTENDED = 2
    ACKED = 3
    """Written before the deletion of the record."""
    DEAD_LETTERED = 4
    """Written before the deletion of the record, and after the dead letter."""
    RESERVED = 5
    """Lease numbers below `lease_id` may have been used."""


LEASES_RESERVED_MAX: Final = 1 << 20
"""A limit: one frame reserves fewer lease numbers than this."""
_HELD: Final = (LeaseEvent.CLAIMED, LeaseEvent.EXTENDED)


def lease_frame(event: LeaseEvent, topic_id: int, job: JobState, *, ts_ms: int) -> bytes:
    """Encode an event of one job, with its state after the event."""
    node = job.node.encode("utf-8", "surrogatepass")
    body = _BODY.pack(event, job.lease_id, job.until_ms, job.deliveries, len(node)) + node
    return encode_control(FrameType.LEASE, topic_id, body, seq=job.seq, ts_ms=ts_ms)


def state_frame(topic_id: int, job: JobState, *, ts_ms: int) -> bytes:
    """Encode the state of one job, for a log that does not have the earlier events."""
    event = LeaseEvent.CLAIMED if job.lease_id else LeaseEvent.RELEASED
    return lease_frame(event, topic_id, job, ts_ms=ts_ms)


def dead_letter_frame(topic_id: int, seq: int, deliveries: int, *, ts_ms: int) -> bytes:
    """Encode the event that counts one job as dead-lettered."""
    body = _BODY.pack(LeaseEvent.DEAD_LETTERED, 0, 0, deliveries, 0)
    return encode_control(FrameType.LEASE, topic_id, body, seq=seq, ts_ms=ts_ms)


def reservation_frame(topic_id: int, below: int, *, ts_ms: int) -> bytes:
    """Encode a reservation: after a crash, lease numbers start at `below`."""
    body = _BODY.pack(LeaseEvent.RESERVED, below, 0, 0, 0)
    return encode_control(FrameType.LEASE, topic_id, body, ts_ms=ts_ms)


def replay_lease(table: LeaseTable, seq: int, body: Buffer, at_ms: int = 0) -> None:
    """Apply one frame that was written at `at_ms`. Replay is idempotent except for the count of dead letters.

    Raises `Corrupt`.
    """
    raw = bytes(body)
    if len(raw) < _BODY.size:
        raise Corrupt(f"the body of a lease frame has only {len(raw)} bytes")
    event, lease_id, until_ms, deliveries, node_bytes = _BODY.unpack_from(raw)
    if len(raw) != _BODY.size + node_bytes:
        raise Corrupt("the body of a lease frame is damaged: its length is wrong")
    if event in _HELD:
        node = raw[_BODY.size :].decode("utf-8", "replace")
        table.put(JobState(seq, deliveries, lease_id, until_ms, node, max(until_ms - at_ms, 1)))
    elif event == LeaseEvent.RELEASED:
        table.put(JobState(seq, deliveries, 0, until_ms, "", max(until_ms - at_ms, 1)))
    elif event == LeaseEvent.RESERVED:
        table.saw_lease_id(lease_id - 1)
    elif event == LeaseEvent.DEAD_LETTERED:
        table.dead_lettered += 1
    elif event != LeaseEvent.ACKED:
        raise Corrupt(f"the body of a lease frame is damaged: unknown event {event}")


_FRAMES_MAX: Final = 1000


def log_leases(topic: Topic, now_ms: int) -> list[asyncio.Future[float]]:
    """Write every lease, delay and delivery count of a queue to the log, so that they outlive the process."""
    assert topic.queue is not None
    jobs = topic.queue.leases.entry(with_leases=True, ahead_ms=topic.log.wall_ahead_ms()).jobs
    frames = [state_frame(topic.id, job, ts_ms=now_ms) for job in jobs]
    parts = [frames[at : at + _FRAMES_MAX] for at in range(0, len(frames), _FRAMES_MAX)]
    logged = [topic.commit(part, urgent=True) for part in parts]
    for outcome in logged:
        outcome.add_done_callback(_retrieve_error)
    return logged


def _retrieve_error(outcome: asyncio.Future[float]) -> None:
    """Retrieve the error, if any. Otherwise asyncio logs it as never retrieved if the caller is cancelled."""
    if not outcome.cancelled():
        outcome.exception()
