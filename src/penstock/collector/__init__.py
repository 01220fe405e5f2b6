"""An OTLP collector: receives over gRPC and HTTP, stores in Quiver, and delivers to every destination.

    plan = load_plan("collector.yaml", variables)
    async with Collector(plan) as collector:
        ...

Each destination is served at its own speed. A request succeeds only when the store has confirmed that it is
durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.collector.collector import Collector
    from penstock.collector.config import Plan, load_plan, parse_plan
    from penstock.collector.dead_letters import DeadLetter, DeadLetters, replay
    from penstock.collector.exporters import concurrency_of, make_otlp_exporter
    from penstock.collector.settings import BufferSettings, OtlpExporterSettings

__all__ = [
    "BufferSettings",
    "Collector",
    "DeadLetter",
    "DeadLetters",
    "OtlpExporterSettings",
    "Plan",
    "concurrency_of",
    "load_plan",
    "make_otlp_exporter",
    "parse_plan",
    "replay",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "collector": "Collector",
            "config": "Plan load_plan parse_plan",
            "dead_letters": "DeadLetter DeadLetters replay",
            "exporters": "concurrency_of make_otlp_exporter",
            "settings": "BufferSettings OtlpExporterSettings",
        },
    )
