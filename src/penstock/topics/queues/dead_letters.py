"""Dead letters: records of jobs that exceeded their deliveries.

The dead letter is written first, then the job is deleted. After a crash in between, the job is still there,
and its letter may be written twice. It is never lost. The topic of the letters decides their durability, but
a letter from a queue of the class `fsync` is synced before its job is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.topics.limits import META_KEYS_MAX
from penstock.topics.model import NewRecord, WriteResult, record_of
from penstock.topics.queues.reading import read_jobs
from penstock.topics.read.render import Style
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.topic import Topic
from penstock.topics.workers import Workers

_LOGGER = logging.getLogger(__name__)
_STYLE: Final = Style(include_tags=True)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODE: Final = msgspec.json.Encoder().encode
_MEMBERS: Final = 3


class WriteLetter(Protocol):
    """Append to a topic, and create it if it does not exist."""

    def __call__(self, name: str, record: NewRecord) -> Awaitable[WriteResult]: ...


DeleteJob = Callable[[Topic, int], Awaitable[None]]
"""Delete a job and count it."""


class DeadLetters:
    """The mover of dead letters. Each move continues even if its caller is cancelled."""

    def __init__(self, catalog: Catalog, workers: Workers, write: WriteLetter, delete: DeleteJob) -> None:
        self._catalog = catalog
        self._workers = workers
        self._write = write
        self._delete = delete
        self._moves: set[asyncio.Future[int]] = set()
        self._writing: set[asyncio.Task[None]] = set()

    async def move(self, topic: Topic, seqs: Sequence[int]) -> int:
        """Move these jobs, which must be marked as moving.

        Return how many were moved; the others are stuck.
        """
        move = asyncio.ensure_future(self._move_all(topic, seqs))
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)
        return await asyncio.shield(move)

    async def settle(self) -> None:
        """Wait until no letter is being written, so that every job with a letter is deleted.

        Jobs that are still being read are not included.
        """
        while self._writing:
            await asyncio.wait(self._writing)

    async def _move_all(self, topic: Topic, seqs: Sequence[int]) -> int:
        assert topic.queue is not None
        table = topic.queue.leases
        try:
            found, _ = await read_jobs(topic, seqs, _STYLE, self._workers)
            moves = [self._begin(topic, seq, found[seq]) for seq in seqs if seq in found]
            outcomes = await asyncio.gather(*moves, return_exceptions=True)
        except PenstockError as error:
            outcomes = [error]
        finally:
            table.stay(seqs)  # has no effect on jobs that were moved
        failed = [error for error in outcomes if isinstance(error, BaseException)]
        if failed:
            _LOGGER.warning(
                'topic "%s": %d jobs could not be moved to "%s" and remain in the queue: %s',
                topic.name,
                len(failed),
                topic.config.dead_letter,
                failed[0],
            )
        return len(outcomes) - len(failed)

    def _begin(self, topic: Topic, seq: int, fragment: bytes) -> asyncio.Task[None]:
        move = asyncio.get_running_loop().create_task(self._move_one(topic, seq, fragment))
        self._writing.add(move)
        move.add_done_callback(self._writing.discard)
        return move

    async def _move_one(self, topic: Topic, seq: int, fragment: bytes) -> None:
        name = topic.config.dead_letter
        assert name is not None
        record = record_of(fragment)
        meta = letter_meta(record.meta, topic.name, topic.config.max_deliveries, seq)
        await self._write(name, NewRecord(record.data, record.tag, record.node, meta))
        letters = self._catalog.find(name)
        if topic.config.durable and letters is not None and not letters.config.durable:
            await letters.sync()
        await self._delete(topic, seq)


def letter_meta(meta: msgspec.Raw | None, topic: str, deliveries: int, seq: int) -> msgspec.Raw:
    """Return the job's own meta with its origin. Meta that is too large or not an object is wrapped."""
    members: dict[str, object] = {
        "$dead_letter_from": topic,
        "$dead_letter_deliveries": str(deliveries),
        "$dead_letter_src_seq": str(seq),
    }
    if meta is not None:
        own = _own(bytes(meta)) if bytes(meta).startswith(b"{") else None
        if own is None or len(own.keys() - members.keys()) > META_KEYS_MAX - _MEMBERS:
            members = {"$dead_letter_meta": meta, **members}
        else:
            members = {**own, **members}
    return msgspec.Raw(_ENCODE(members))


def _own(meta: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the members of the job's meta, or None if it is nested deeper than the decoder allows."""
    try:
        return _OBJECT.decode(meta)
    except RecursionError:
        return None
