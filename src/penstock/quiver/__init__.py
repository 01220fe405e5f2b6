"""Quiver: a durable buffer for Arrow batches, in one directory, with progress per subscriber."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.quiver.append import Receipt
    from penstock.quiver.config import QuiverConfig
    from penstock.quiver.core import QuiverStats
    from penstock.quiver.delivery.leases import Bundle
    from penstock.quiver.engine import AsyncQuiver, Quiver
    from penstock.quiver.errors import AtCapacity, Closed, Locked, StaleClaim, UnknownSubscriber
    from penstock.quiver.model import SLOTS, BundleRef, SegmentInfo, Signal, flat_slot, slot_name
    from penstock.quiver.offsets.external import ExternalAck, commit_offset
    from penstock.quiver.offsets.progress import Ranges
    from penstock.quiver.offsets.state import Subscriber, SubscriberState, check_name
    from penstock.quiver.segments.file import SegmentReader
    from penstock.quiver.segments.source import (
        LocalSegments,
        SegmentSource,
        StoredSegments,
        core_directory,
        is_store_url,
        open_source,
    )
    from penstock.quiver.tools.dataset import known_schema, select, text_view, unified_schema
    from penstock.quiver.tools.export import TimestampUnit, export_parquet
    from penstock.quiver.tools.fsck import CheckedCore, check, core_directories, is_in_use, repair
    from penstock.quiver.tools.offline import (
        AckEvent,
        SubscriberLook,
        drop_subscriber,
        look_at_progress,
        look_at_subscribers,
        read_history,
    )

__all__ = [
    "SLOTS",
    "AckEvent",
    "AsyncQuiver",
    "AtCapacity",
    "Bundle",
    "BundleRef",
    "CheckedCore",
    "Closed",
    "ExternalAck",
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
    "commit_offset",
    "core_directories",
    "core_directory",
    "drop_subscriber",
    "export_parquet",
    "flat_slot",
    "is_in_use",
    "is_store_url",
    "known_schema",
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
            "append": "Receipt",
            "config": "QuiverConfig",
            "core": "QuiverStats",
            "delivery.leases": "Bundle",
            "engine": "AsyncQuiver Quiver",
            "errors": "AtCapacity Closed Locked StaleClaim UnknownSubscriber",
            "model": "SLOTS BundleRef SegmentInfo Signal flat_slot slot_name",
            "offsets.external": "ExternalAck commit_offset",
            "offsets.progress": "Ranges",
            "offsets.state": "Subscriber SubscriberState check_name",
            "segments.file": "SegmentReader",
            "segments.source": (
                "LocalSegments SegmentSource StoredSegments core_directory is_store_url open_source"
            ),
            "tools.dataset": "known_schema select text_view unified_schema",
            "tools.export": "TimestampUnit export_parquet",
            "tools.fsck": "CheckedCore check core_directories is_in_use repair",
            "tools.offline": (
                "AckEvent SubscriberLook drop_subscriber look_at_progress look_at_subscribers read_history"
            ),
        },
    )
