"""Every part of a machine, run together: planned from one file, supervised, stopped in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.up.fleet import OWN_NAME, Fleet
    from penstock.up.health import Front
    from penstock.up.noise import NoiseFilter
    from penstock.up.parts import DATA_DIR_VARIABLE, PartPlan, Plan, Probe, pipeline_environment
    from penstock.up.plan import plan_of, port_faults, wanted_ports
    from penstock.up.probe import address_of, reachable
    from penstock.up.settings import UpSettings, faults_of, read_settings
    from penstock.up.status import (
        FleetEvent,
        FleetMap,
        FleetView,
        Level,
        LogLine,
        PartKind,
        PartState,
        PartStatus,
        PipelinePlace,
        QueuePlace,
        QuiverPlace,
    )

__all__ = [
    "DATA_DIR_VARIABLE",
    "OWN_NAME",
    "Fleet",
    "FleetEvent",
    "FleetMap",
    "FleetView",
    "Front",
    "Level",
    "LogLine",
    "NoiseFilter",
    "PartKind",
    "PartPlan",
    "PartState",
    "PartStatus",
    "PipelinePlace",
    "Plan",
    "Probe",
    "QueuePlace",
    "QuiverPlace",
    "UpSettings",
    "address_of",
    "faults_of",
    "pipeline_environment",
    "plan_of",
    "port_faults",
    "reachable",
    "read_settings",
    "wanted_ports",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fleet": "OWN_NAME Fleet",
            "health": "Front",
            "noise": "NoiseFilter",
            "parts": "DATA_DIR_VARIABLE PartPlan Plan Probe pipeline_environment",
            "plan": "plan_of port_faults wanted_ports",
            "probe": "address_of reachable",
            "settings": "UpSettings faults_of read_settings",
            "status": (
                "FleetEvent FleetMap FleetView Level LogLine PartKind PartState PartStatus PipelinePlace "
                "QueuePlace QuiverPlace"
            ),
        },
    )
