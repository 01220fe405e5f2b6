"""One sealed batch on its way from memory into the queue."""

from __future__ import annotations

import asyncio
import random

from penstock import errors
from penstock.buffer.batch import CompressionType, EncodedBatch, encode_batch
from penstock.buffer.errors import BufferError, StorageError, storage_error
from penstock.buffer.manifest import NewEntry
from penstock.buffer.open_batch import OpenBatch
from penstock.clock import Clock
from penstock.ids import mint_ulid
from penstock.objects import ObjectStore
from penstock.retry import RetryPolicy, retry

__all__ = ["STALE_AFTER_S", "BatchUpload"]

STALE_AFTER_S = 300.0
"""Half of the usual grace period: collectors that know no floor go by age alone, so a batch that
waited this long is stored anew before it is referenced."""

INLINE_BYTES = 256 * 1024
"""Below this, encoding costs less than a hop to a thread."""


class BatchUpload:
    """Encodes and stores a batch; keeps the bytes until the batch is in the queue."""

    __slots__ = (
        "_clock",
        "_compression",
        "_encoded",
        "_policy",
        "_prefix",
        "_rng",
        "_store",
        "_stored_at",
        "batch",
        "error",
        "finished",
        "location",
        "minted_ms",
        "sealed_at",
    )

    def __init__(
        self,
        batch: OpenBatch,
        *,
        store: ObjectStore,
        prefix: str,
        compression: CompressionType,
        policy: RetryPolicy,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.batch = batch
        self.location = ""
        self.minted_ms = -1
        self.sealed_at = clock.monotonic()
        self.finished = False
        self.error: BufferError | None = StorageError("the batch was not stored")
        self._store = store
        self._prefix = prefix
        self._compression = compression
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._encoded: EncodedBatch | None = None
        self._stored_at = 0.0

    @property
    def object_bytes(self) -> int:
        return 0 if self._encoded is None else self._encoded.size

    async def run(self, floor_ms: int) -> None:
        """Encode and store. Leaves an `error` instead of raising it, as nobody but the committer asks.

        There is an error until the batch is known to be stored: whatever ends this early, the batch is
        never taken for one that can be referenced.
        """
        try:
            self._encoded = await self._encode()
            await self._put(floor_ms)
            self.error = None
        except errors.PenstockError as error:
            self.error = storage_error(error, f"storing a batch under {self._prefix}")
        except Exception as error:  # noqa: BLE001  a defect of a store or of ours fails this batch alone
            self.error = StorageError(f"storing a batch of {self.batch.count} records failed: {error!r}")
        finally:
            self.finished = True

    async def _encode(self) -> EncodedBatch:
        chunks = self.batch.take_chunks()
        if self._compression is CompressionType.NONE or self.batch.record_bytes < INLINE_BYTES:
            return encode_batch(chunks, self._compression)  # uncompressed, the store's thread encodes
        return await asyncio.to_thread(encode_batch, chunks, self._compression)

    async def _put(self, floor_ms: int) -> None:
        assert self._encoded is not None
        minted_ms = max(self._clock.now_ms(), floor_ms + 1)
        location = f"{self._prefix}/{mint_ulid(minted_ms, self._rng)}.batch"
        parts = self._encoded.parts
        started = self._clock.monotonic()
        await retry(lambda: self._store.put(location, parts), self._policy, clock=self._clock, rng=self._rng)
        # Only now: a name that was not stored must never look like one that can be referenced.
        self.minted_ms, self.location, self._stored_at = minted_ms, location, started

    def entry(self) -> NewEntry:
        return NewEntry(location=self.location, metadata=self.batch.metadata)

    def is_stale(self, floor_ms: int) -> bool:
        return self.minted_ms <= floor_ms or self._clock.monotonic() - self._stored_at > STALE_AFTER_S

    async def relocate(self, floor_ms: int) -> None:
        await self._put(floor_ms)
