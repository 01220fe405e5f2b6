"""Every part of a machine, run together: planned from one file, supervised, stopped in order."""

from __future__ import annotations

from penstock.up.fleet import Fleet
from penstock.up.parts import Plan
from penstock.up.plan import plan_of
from penstock.up.settings import UpSettings, read_settings
from penstock.up.status import FleetMap, FleetView, LogLine, PartState, PartStatus

__all__ = [
    "Fleet",
    "FleetMap",
    "FleetView",
    "LogLine",
    "PartState",
    "PartStatus",
    "Plan",
    "UpSettings",
    "plan_of",
    "read_settings",
]
