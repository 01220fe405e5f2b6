"""Quiver: a durable buffer for Arrow batches, in one directory, with progress per subscriber."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.quiver.async_quiver import AsyncQuiver
    from penstock.quiver.bundle import Bundle
    from penstock.quiver.config import QuiverConfig
    from penstock.quiver.engine import Quiver
    from penstock.quiver.errors import AtCapacity, Closed, Locked, StaleClaim, UnknownSubscriber
    from penstock.quiver.model import BundleRef, SegmentInfo, Signal
    from penstock.quiver.preparation import Receipt
    from penstock.quiver.stats import QuiverStats
    from penstock.quiver.subscribers import Subscriber, SubscriberState

__all__ = [
    "AsyncQuiver",
    "AtCapacity",
    "Bundle",
    "BundleRef",
    "Closed",
    "Locked",
    "Quiver",
    "QuiverConfig",
    "QuiverStats",
    "Receipt",
    "SegmentInfo",
    "Signal",
    "StaleClaim",
    "Subscriber",
    "SubscriberState",
    "UnknownSubscriber",
]

_HOMES: Final = {
    "AsyncQuiver": "async_quiver",
    "AtCapacity": "errors",
    "Bundle": "bundle",
    "BundleRef": "model",
    "Closed": "errors",
    "Locked": "errors",
    "Quiver": "engine",
    "QuiverConfig": "config",
    "QuiverStats": "stats",
    "Receipt": "preparation",
    "SegmentInfo": "model",
    "Signal": "model",
    "StaleClaim": "errors",
    "Subscriber": "subscribers",
    "SubscriberState": "subscribers",
    "UnknownSubscriber": "errors",
}
"""Where each name lives: Arrow is imported by whoever asks for one of them."""


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
