"""Every part of a machine, run together: planned from one file, supervised, stopped in order."""

from __future__ import annotations

from penstock.services.fleet.fleet import Fleet
from penstock.services.fleet.parts import Plan
from penstock.services.fleet.plan import plan_of
from penstock.services.fleet.settings import UpSettings, read_settings
from penstock.services.fleet.status import FleetMap, FleetView, LogLine, PartState, PartStatus

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
