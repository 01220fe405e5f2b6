"""A vector database over object storage.

    async with await VectorStore.open(VectorConfig(store="file:///data", dimensions=3)) as store:
        await store.upsert([Vector("a", [1, 0, 0], {"lang": "en"})])
        await store.flush()
        hits = await store.search([1, 0, 0], k=10)

One process writes; every write has an epoch and becomes applied, flushed and durable. Searches see what is
flushed. See docs/concepts/vector.md.
"""

from __future__ import annotations

from penstock.vector.codec import merge_records
from penstock.vector.config import VectorConfig
from penstock.vector.delta import Write
from penstock.vector.filters import And, Eq, Filter, In, Neq, Or
from penstock.vector.model import Collection, Field, FieldType, Hit, Hits, Metric, Vector
from penstock.vector.recall import Recall
from penstock.vector.store import VectorStore

__all__ = [
    "And",
    "Collection",
    "Eq",
    "Field",
    "FieldType",
    "Filter",
    "Hit",
    "Hits",
    "In",
    "Metric",
    "Neq",
    "Or",
    "Recall",
    "Vector",
    "VectorConfig",
    "VectorStore",
    "Write",
    "merge_records",
]
