"""Blocking form of the vector store, with the same names, for scripts and Spark tasks.

with VectorStore.open(VectorConfig(store="file:///data", dimensions=3)) as store:
    store.upsert([Vector("a", [1, 0, 0])])
    store.flush()
    store.search([1, 0, 0], k=10)
"""

from __future__ import annotations

from penstock.blocking import blocking, blocking_open
from penstock.coordinator import BlockingDatabase
from penstock.coordinator import BlockingWriteHandle as WriteHandle
from penstock.vector import store as _store
from penstock.vector.model import Collection

__all__ = ["VectorStore"]


class VectorStore(BlockingDatabase[_store.VectorStore]):
    """Blocking form of `penstock.vector.VectorStore`; threads may share it."""

    open = blocking_open(_store.VectorStore.open)

    upsert = blocking(_store.VectorStore.upsert, WriteHandle)
    delete = blocking(_store.VectorStore.delete, WriteHandle)
    write = blocking(_store.VectorStore.write, WriteHandle)
    flush = blocking(_store.VectorStore.flush)

    get = blocking(_store.VectorStore.get)
    search = blocking(_store.VectorStore.search)
    recall = blocking(_store.VectorStore.recall)
    abort = blocking(_store.VectorStore.abort)

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def collection(self) -> Collection:
        """The properties common to all vectors of the collection."""
        return self._inner.collection

    @property
    def position(self) -> int | None:
        """The position in the source of the vectors, as of the last flush."""
        return self._inner.position

    @property
    def source(self) -> str:
        """The name of the source that `position` refers to, or empty if it has none."""
        return self._inner.source

    @property
    def location(self) -> str:
        """The name of the batch that `position` refers to, or empty if none was stored."""
        return self._inner.location
