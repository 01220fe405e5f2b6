"""A vector database over object storage.

    async with await VectorStore.open(VectorConfig(store="file:///data", dimensions=3)) as store:
        await store.upsert([Vector("a", [1, 0, 0], {"lang": "en"})])
        await store.flush()
        hits = await store.search([1, 0, 0], k=10)

One process writes. Every write has an epoch and becomes applied, flushed and durable. Searches see flushed
writes. See docs/concepts/vector.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.vector.api import (
        decoded_size,
        deleted_answer,
        error_answer,
        parse_delete,
        parse_recall,
        parse_search,
        parse_write,
        recall_answer,
        search_answer,
        search_bytes_max,
        upserted_answer,
        vector_answer,
    )
    from penstock.vector.codec import merge_records
    from penstock.vector.config import VectorConfig
    from penstock.vector.delta import TOMBSTONE, Entry, Write
    from penstock.vector.filters import And, Eq, Filter, In, Neq, Or
    from penstock.vector.index import Recall
    from penstock.vector.model import Collection, Field, FieldType, Hit, Hits, Metric, Vector
    from penstock.vector.records import decode_record
    from penstock.vector.store import VectorStore

__all__ = [
    "TOMBSTONE",
    "And",
    "Collection",
    "Entry",
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
    "decode_record",
    "decoded_size",
    "deleted_answer",
    "error_answer",
    "merge_records",
    "parse_delete",
    "parse_recall",
    "parse_search",
    "parse_write",
    "recall_answer",
    "search_answer",
    "search_bytes_max",
    "upserted_answer",
    "vector_answer",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "api": (
                "decoded_size deleted_answer error_answer parse_delete parse_recall parse_search parse_write "
                "recall_answer search_answer search_bytes_max upserted_answer vector_answer"
            ),
            "codec": "merge_records",
            "config": "VectorConfig",
            "delta": "TOMBSTONE Entry Write",
            "filters": "And Eq Filter In Neq Or",
            "index": "Recall",
            "model": "Collection Field FieldType Hit Hits Metric Vector",
            "records": "decode_record",
            "store": "VectorStore",
        },
    )
