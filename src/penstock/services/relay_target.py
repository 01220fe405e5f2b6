"""The queue's side of a relay: where it stands there, and one batch more."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote

import msgspec
import xxhash

from penstock.buffer import (
    NO_VERSION,
    Entry,
    EntryIndex,
    Metadata,
    ProducerConfig,
    QueueReader,
    StaleTransaction,
    Transaction,
    append_batches,
    find_tag,
    last_version,
    read_layout,
    shard_config,
    shard_of,
    storage_error,
    store_batch,
)
from penstock.clock import Clock
from penstock.errors import Corrupt, NotFound, PenstockError
from penstock.objects import open_store
from penstock.retry import RetryPolicy
from penstock.services.relay_draft import Draft, Identity, identity_of
from penstock.services.relay_errors import RelayTaken
from penstock.topics import UnreadableRecord

__all__ = ["Position", "RelayLetter", "RelayTarget", "open_target"]

_log = logging.getLogger(__name__)


class _Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last record that was relayed, and the number of its batch in the queue."""

    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")
    number: int | None = None
    """None of a note that an earlier version wrote."""


_LOOK_BACK: Final = 64
"""Entries looked through, from the newest, for the last one of this relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the queue has the topic: through `seq`, or nothing of it when that is None."""

    seq: int | None
    last: Identity | None = None
    """The last record that was relayed, if the queue or the object beside it still names it."""


class RelayLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A record that was not relayed: where it stands, why, and its text as the topic has it (base64)."""

    topic: str
    seq: int
    ts_ms: int
    reason: str
    recorded_at_ms: int
    data: bytes


class RelayTarget:
    """One queue, or the one shard of it that this application's batches go into."""

    def __init__(self, config: ProducerConfig, app: str, *, clock: Clock, rng: random.Random) -> None:
        self._config = config
        self._app = app
        self._clock = clock
        self._rng = rng
        self._store = open_store(config.store, deadline_s=config.append_deadline_s)
        digest = xxhash.xxh3_64_hexdigest(app.encode())
        self._identity_key = f"{config.manifest_key}.relay/{digest}.json"

    async def position(self, topic: str) -> Position:
        """Where the last batch that is in the queue, or was, has brought it. Raises `StorageError`.

        Warns if this relay has been further: the queue or its transaction book went back, and the records
        are relayed again. Raises `Corrupt` if only the queue went back: they would not be.
        """
        seq = await self._last_version()
        remembered = await self._remembered()
        if remembered is not None and remembered.seq > (seq or 0):
            seq = await self._last_version()  # another relay may have appended between the two reads
        if remembered is not None and remembered.seq > (seq or 0):
            _log.warning(
                "%s has %s up to %d, but %d was relayed before: the queue, or its transaction book %s.txn, "
                "was removed or replaced by an older copy. The records after that are relayed again, and may "
                "be in the queue twice",
                self._config.manifest_key,
                topic,
                seq or 0,
                remembered.seq,
                self._config.manifest_key,
            )
        if seq is None:
            return Position(seq=None)
        index = await QueueReader(self._store, self._config.manifest_key, clock=self._clock).index()
        if remembered is not None and remembered.seq <= seq:
            self._check_queue(index, remembered)
        entry = _newest(index, self._app)
        payloads = [] if entry is None else [item.payload for item in entry.metadata]
        known = None
        if remembered is not None and remembered.seq <= seq:
            known = Identity(seq=remembered.seq, ts_ms=remembered.ts_ms)
        return Position(seq=seq, last=identity_of(payloads, topic) or known)

    def _check_queue(self, index: EntryIndex, remembered: _Note) -> None:
        """Raises `Corrupt` if the queue has yet to assign the number that this relay's last batch has."""
        end = index.footer.next_sequence
        if remembered.number is not None and end <= remembered.number:
            raise Corrupt(
                f"{self._config.manifest_key} ends before number {end}, and batch {remembered.number} of "
                f"{self._app!r} was in it: the queue was removed or replaced by an older copy. Restore it; "
                "or, if what is missing was delivered or may be lost, relay under another name (app)"
            )

    async def _last_version(self) -> int | None:
        return await last_version(
            self._config, self._app, store=self._store, clock=self._clock, rng=self._rng
        )

    async def set_aside(self, topic: str, bad: UnreadableRecord, text: bytes) -> str:
        """Store a record that is not relayed beside the queue. Returns the key, the same for each attempt."""
        letter = RelayLetter(
            topic=topic,
            seq=bad.seq,
            ts_ms=bad.ts_ms,
            reason=bad.reason,
            recorded_at_ms=self._clock.now_ms(),
            data=text,
        )
        # Stores take no percent sign and no tilde in a key.
        folder = quote(self._app, safe="").replace("~", "%7E").replace("%", "=")
        key = f"{self._config.manifest_key}.dead/relay/{folder}/{bad.seq:020d}.json"
        await self._store.put(key, msgspec.json.encode(letter))
        return key

    async def append(self, draft: Draft, follows: int | None) -> None:
        """Make a draft durable, once, behind `follows` (None: it is the first). Raises `StorageError`.

        `RelayTaken` tells that the queue stands elsewhere by now: nothing was appended.
        """
        now_ms = self._clock.now_ms()
        items = [
            Metadata(start_index=start, ingestion_time_ms=now_ms, payload=payload)
            for start, payload in draft.metadata()
        ]
        batch = await store_batch(
            self._store,
            self._config.prefix,
            draft.chunks,
            compression=self._config.compression,
            metadata=items,
            clock=self._clock,
            rng=self._rng,
            policy=RetryPolicy(deadline_s=self._config.append_deadline_s),
        )
        try:
            done = await append_batches(
                self._config,
                [batch],
                Transaction(app=self._app, version=draft.through),
                follows=NO_VERSION if follows is None else follows,
                store=self._store,
                clock=self._clock,
                rng=self._rng,
            )
        except StaleTransaction as error:
            raise RelayTaken(
                f"another process relays {draft.topic} as {self._app!r}: {self._config.manifest_path} has "
                f"records behind {follows or 'the beginning'} already. Stop one of the two"
            ) from error
        if draft.last is not None:
            await self._remember(draft.last, done.first)

    async def _remember(self, last: Identity, number: int | None) -> None:
        """Keep the last record outside the queue too: once its batch was consumed, nothing else names it.

        The batch is in the queue, so failing is worth a warning only.
        """
        try:
            note = _Note(seq=last.seq, ts_ms=last.ts_ms, number=number)
            await self._store.put(self._identity_key, msgspec.json.encode(note))
        except PenstockError as error:
            _log.warning("%s was not written: %s", self._identity_key, error)

    async def _remembered(self) -> _Note | None:
        try:
            raw = (await self._store.get(self._identity_key)).data
            return msgspec.json.decode(raw, type=_Note)
        except NotFound:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            _log.warning("%s does not decode; the topic is taken on trust", self._identity_key)
            return None
        except PenstockError as error:
            raise storage_error(error, f"reading {self._identity_key}") from error


@asynccontextmanager
async def open_target(
    config: ProducerConfig, app: str, *, clock: Clock, rng: random.Random
) -> AsyncIterator[RelayTarget]:
    """The queue with its store open; of a sharded queue, the shard of `app`."""
    store = open_store(config.store, deadline_s=config.append_deadline_s)
    try:
        shards = await read_layout(store, config.manifest_key)
        own = config if shards is None else shard_config(config, shard_of(app.encode(), shards))
        yield RelayTarget(replace(own, store=store), app, clock=clock, rng=rng)
    finally:
        if store is not config.store:
            await store.close()


def _newest(index: EntryIndex, app: str) -> Entry | None:
    """The newest entry of `app`, if it is among the last ones of the queue."""
    for number in reversed(range(max(0, len(index) - _LOOK_BACK), len(index))):
        tag = find_tag(index[number].tail)
        if tag is not None and tag.app == app:
            return index[number]
    return None
