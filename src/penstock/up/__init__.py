"""All parts of a machine, run together: planned from one file, supervised, and stopped in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.up.fleet import OWN_NAME, Fleet
    from penstock.up.health import Front
    from penstock.up.log import SparkTraceFilter
    from penstock.up.parts import (
        DATA_DIR_VARIABLE,
        PartPlan,
        Plan,
        Probe,
        address_of,
        missing_extra,
        pipeline_environment,
        reachable,
    )
    from penstock.up.plan import plan_of, port_faults, wanted_ports
    from penstock.up.preflight import (
        Prepared,
        UpFile,
        check_ports,
        data_directory,
        hold,
        layered,
        prepare,
        scratch_of_spark,
        write_collector_file,
        write_if_missing,
    )
    from penstock.up.runner import PART_COMMAND, CommandOutcome, run_command
    from penstock.up.settings import UpSettings, faults_of, read_settings
    from penstock.up.status import (
        CollectorPlace,
        DatabasePlace,
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
        RelayPlace,
        TopicsPlace,
    )

__all__ = [
    "DATA_DIR_VARIABLE",
    "OWN_NAME",
    "PART_COMMAND",
    "CollectorPlace",
    "CommandOutcome",
    "DatabasePlace",
    "Fleet",
    "FleetEvent",
    "FleetMap",
    "FleetView",
    "Front",
    "Level",
    "LogLine",
    "PartKind",
    "PartPlan",
    "PartState",
    "PartStatus",
    "PipelinePlace",
    "Plan",
    "Prepared",
    "Probe",
    "QueuePlace",
    "QuiverPlace",
    "RelayPlace",
    "SparkTraceFilter",
    "TopicsPlace",
    "UpFile",
    "UpSettings",
    "address_of",
    "check_ports",
    "data_directory",
    "faults_of",
    "hold",
    "layered",
    "missing_extra",
    "pipeline_environment",
    "plan_of",
    "port_faults",
    "prepare",
    "reachable",
    "read_settings",
    "run_command",
    "scratch_of_spark",
    "wanted_ports",
    "write_collector_file",
    "write_if_missing",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fleet": "OWN_NAME Fleet",
            "health": "Front",
            "log": "SparkTraceFilter",
            "parts": (
                "DATA_DIR_VARIABLE PartPlan Plan Probe address_of missing_extra pipeline_environment "
                "reachable"
            ),
            "plan": "plan_of port_faults wanted_ports",
            "preflight": (
                "Prepared UpFile check_ports data_directory hold layered prepare scratch_of_spark "
                "write_collector_file write_if_missing"
            ),
            "runner": "PART_COMMAND CommandOutcome run_command",
            "settings": "UpSettings faults_of read_settings",
            "status": (
                "CollectorPlace DatabasePlace FleetEvent FleetMap FleetView Level LogLine PartKind PartState "
                "PartStatus PipelinePlace QueuePlace QuiverPlace RelayPlace TopicsPlace"
            ),
        },
    )
