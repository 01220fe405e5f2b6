"""Vectors without an event loop: the same names, calls that wait. For scripts and Spark tasks.

with VectorStore.open(VectorConfig(store="file:///data", dimensions=3)) as store:
    store.upsert([Vector("a", [1, 0, 0])])
    store.flush()
    store.search([1, 0, 0], k=10)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import BlockingDatabase, Storage
from penstock.coordinator import BlockingWriteHandle as WriteHandle
from penstock.metrics import Registry
from penstock.vector import store as _store
from penstock.vector.config import VectorConfig
from penstock.vector.delta import Write
from penstock.vector.filters import Filter
from penstock.vector.model import Collection, Components, Hits, Vector
from penstock.vector.recall import Recall

__all__ = ["VectorStore"]


class VectorStore(BlockingDatabase[_store.VectorStore]):
    """Blocking twin of `penstock.vector.VectorStore`; threads may share it."""

    @classmethod
    def open(
        cls,
        config: VectorConfig,
        *,
        storage: Storage | None = None,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
    ) -> VectorStore:
        """Open the collection, or create it if there is none. See the async `open`."""
        loop = loop_thread()
        opening = _store.VectorStore.open(config, storage=storage, clock=clock, registry=registry)
        return cls(loop.run(opening), loop)

    @property
    def collection(self) -> Collection:
        """What the vectors have in common."""
        return self._inner.collection

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def position(self) -> int | None:
        """Where the source of the vectors stood, as of the last flush."""
        return self._inner.position

    @property
    def source(self) -> str:
        """The name of the source that `position` is of, or nothing if it has none."""
        return self._inner.source

    @property
    def location(self) -> str:
        """The name of the batch that `position` is of, or nothing if it was not stored."""
        return self._inner.location

    def upsert(self, vectors: Iterable[Vector], *, timeout: float | None = None) -> WriteHandle:
        """Store vectors, each in place of what its id stood for. See the async `upsert`."""
        return WriteHandle(self._loop.run(self._inner.upsert(vectors, timeout=timeout)), self._loop)

    def delete(self, ids: Iterable[str], *, timeout: float | None = None) -> WriteHandle:
        """Delete vectors. An id that stands for nothing is no error."""
        return WriteHandle(self._loop.run(self._inner.delete(ids, timeout=timeout)), self._loop)

    def write(self, write: Write, *, timeout: float | None = None) -> WriteHandle:
        """One write of upserts and deletions in order, and where their source stands."""
        return WriteHandle(self._loop.run(self._inner.write(write, timeout=timeout)), self._loop)

    def flush(self, *, durable: bool = True) -> None:
        """Return when everything written before is visible, and with `durable` safe. Raises `FlushError`."""
        self._loop.run(self._inner.flush(durable=durable))

    def get(self, external_id: str) -> Vector | None:
        """The vector as it was written, or None. Raises `Unavailable`, `Fenced`, `Corrupt`."""
        return self._loop.run(self._inner.get(external_id))

    def search(
        self,
        vector: Components,
        k: int = 10,
        *,
        filter: Filter | None = None,
        include_fields: Sequence[str] | None = None,
        nprobe: int | None = None,
    ) -> Hits:
        """The `k` vectors nearest to this one, best first. See the async `search`."""
        searching = self._inner.search(vector, k, filter=filter, include_fields=include_fields, nprobe=nprobe)
        return self._loop.run(searching)

    def recall(
        self, *, sample: int = 100, k: int = 10, filter: Filter | None = None, nprobe: int | None = None
    ) -> Recall:
        """How much of what an exact search finds `search` finds. See the async `recall`."""
        return self._loop.run(self._inner.recall(sample=sample, k=k, filter=filter, nprobe=nprobe))

    def abort(self) -> None:
        """Stop at once, as a crash would: what is not durable may be lost."""
        self._loop.run(self._inner.abort())
