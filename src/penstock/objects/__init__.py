"""Object stores with a real compare-and-swap: in memory, in a directory, and on S3, Azure and Google."""

from __future__ import annotations

from penstock.objects.errors import BucketNotFound
from penstock.objects.keys import check_prefix, join_key, normalise_key
from penstock.objects.local import LocalStore, Workers
from penstock.objects.memory import MemoryStore, named_memory_store
from penstock.objects.opening import check_conditional_writes, ensure_conditional_writes, open_store
from penstock.objects.settings import StoreAddress, StoreConfig
from penstock.objects.store import Blob, ByteRange, Data, ObjectInfo, ObjectStore, Version

__all__ = [
    "Blob",
    "BucketNotFound",
    "ByteRange",
    "Data",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "ObjectStore",
    "StoreAddress",
    "StoreConfig",
    "Version",
    "Workers",
    "check_conditional_writes",
    "check_prefix",
    "ensure_conditional_writes",
    "join_key",
    "named_memory_store",
    "normalise_key",
    "open_store",
]
