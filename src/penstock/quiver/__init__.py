"""Quiver: a durable buffer for Arrow batches, in one directory, with progress per subscriber."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.quiver.ack_history import AckEvent, read_history
    from penstock.quiver.ack_inbox import AckNote, leave_note
    from penstock.quiver.async_quiver import AsyncQuiver
    from penstock.quiver.bundle import Bundle
    from penstock.quiver.config import QuiverConfig
    from penstock.quiver.dataset import select, unified_schema
    from penstock.quiver.engine import Quiver
    from penstock.quiver.errors import AtCapacity, Closed, Locked, StaleClaim, UnknownSubscriber
    from penstock.quiver.export import TimestampUnit, export_parquet
    from penstock.quiver.fsck import CheckedCore, Severity, check, core_directories, is_in_use, repair
    from penstock.quiver.model import BundleRef, SegmentInfo, Signal
    from penstock.quiver.offline import SubscriberLook, drop_subscriber, look_at_progress, look_at_subscribers
    from penstock.quiver.preparation import Receipt
    from penstock.quiver.ranges import Ranges
    from penstock.quiver.segment_file import SegmentReader
    from penstock.quiver.segment_source import (
        LocalSegments,
        SegmentSource,
        StoredSegments,
        core_directory,
        is_store_url,
        open_source,
    )
    from penstock.quiver.slots import SLOTS, flat_slot, slot_name
    from penstock.quiver.stats import QuiverStats
    from penstock.quiver.subscribers import Subscriber, SubscriberState, check_name
    from penstock.quiver.views import known_schema, text_view

__all__ = [
    "SLOTS",
    "AckEvent",
    "AckNote",
    "AsyncQuiver",
    "AtCapacity",
    "Bundle",
    "BundleRef",
    "CheckedCore",
    "Closed",
    "LocalSegments",
    "Locked",
    "Quiver",
    "QuiverConfig",
    "QuiverStats",
    "Ranges",
    "Receipt",
    "SegmentInfo",
    "SegmentReader",
    "SegmentSource",
    "Severity",
    "Signal",
    "StaleClaim",
    "StoredSegments",
    "Subscriber",
    "SubscriberLook",
    "SubscriberState",
    "TimestampUnit",
    "UnknownSubscriber",
    "check",
    "check_name",
    "core_directories",
    "core_directory",
    "drop_subscriber",
    "export_parquet",
    "flat_slot",
    "is_in_use",
    "is_store_url",
    "known_schema",
    "leave_note",
    "look_at_progress",
    "look_at_subscribers",
    "open_source",
    "read_history",
    "repair",
    "select",
    "slot_name",
    "text_view",
    "unified_schema",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ack_history": "AckEvent read_history",
            "ack_inbox": "AckNote leave_note",
            "async_quiver": "AsyncQuiver",
            "bundle": "Bundle",
            "config": "QuiverConfig",
            "dataset": "select unified_schema",
            "engine": "Quiver",
            "errors": "AtCapacity Closed Locked StaleClaim UnknownSubscriber",
            "export": "TimestampUnit export_parquet",
            "fsck": "CheckedCore Severity check core_directories is_in_use repair",
            "model": "BundleRef SegmentInfo Signal",
            "offline": "SubscriberLook drop_subscriber look_at_progress look_at_subscribers",
            "preparation": "Receipt",
            "ranges": "Ranges",
            "segment_file": "SegmentReader",
            "segment_source": (
                "LocalSegments SegmentSource StoredSegments core_directory is_store_url open_source"
            ),
            "slots": "SLOTS flat_slot slot_name",
            "stats": "QuiverStats",
            "subscribers": "Subscriber SubscriberState check_name",
            "views": "known_schema text_view",
        },
    )
