"""OTLP in over gRPC and HTTP, kept in Quiver, and out to every destination at its own pace.

    plan = load_plan("collector.yaml", variables)
    async with Collector(plan) as collector:
        ...

A request is answered with success only when the store says that it is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.collector.collector import Collector
    from penstock.collector.config import Plan, load_plan, parse_plan

__all__ = ["Collector", "Plan", "load_plan", "parse_plan"]

_PLACES = {"Collector": "collector", "Plan": "config", "load_plan": "config", "parse_plan": "config"}


def __getattr__(name: str) -> object:
    """gRPC and Arrow are loaded by whoever runs a collector, not by whoever asks for help."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"penstock.collector.{_PLACES[name]}"), name)
