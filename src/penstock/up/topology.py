"""Validates the files of parts, and completes the map of the fleet from them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.config import Setting, load_mapping, merge
from penstock.errors import ConfigError
from penstock.objects import StoreAddress
from penstock.up.parts import (
    DATA_DIR_VARIABLE,
    PartPlan,
    Plan,
    Probe,
    missing_extra,
    pipeline_environment,
)
from penstock.up.status import FleetMap, PartKind, PipelinePlace, QueuePlace, QuiverPlace

if TYPE_CHECKING:
    from penstock.collector import Plan as CollectorPlan
    from penstock.spark import BufferSourceSpec, PipelineSpec


def _read_pipeline(file: str, data_dir: str) -> PipelineSpec:
    """Read a pipeline with the fleet's environment. Raise `ConfigError` if it is invalid."""
    from penstock.spark import load_spec

    return load_spec(file, pipeline_environment(data_dir))


def collector_faults(plan: Plan, disabled: Iterable[str]) -> dict[str, str]:
    """Return the error in the collector's file, if any, keyed by the part's name."""
    part = _collector_part(plan, disabled)
    if part is None:
        return {}
    try:
        _collector_plan(plan)
    except ConfigError as error:
        return {part.name: str(error)}
    return {}


def pipeline_faults(plan: Plan, disabled: Iterable[str]) -> dict[str, str]:
    """Return the errors in pipeline files, keyed by the part's name."""
    off, faults = set(disabled), {}
    for part in plan.parts:
        if part.kind is PartKind.PIPELINE and part.name not in off and not _is_ours(plan, part):
            try:
                _read_pipeline(part.file or "", plan.layout.data_dir)
            except ConfigError as error:
                faults[part.name] = str(error)
    return faults


def queue_faults(plan: Plan, disabled: Iterable[str]) -> dict[str, str]:
    """Return errors for pipelines that probably read the wrong queue, keyed by the part's name.

    The plan must already have its map. Another machine may write to a queue without a producer here, so this
    is an error only if a queue with the same path in another store has a producer here and no consumer.
    """
    off, faults = set(disabled), {}
    queues = {queue.name: queue for queue in plan.map.queues}
    for place in plan.map.pipelines:
        read = queues.get(place.queue or "")
        if read is None or _writers(read, off):
            continue
        for other in queues.values():
            is_alike = other.manifest_path.strip("/") == read.manifest_path.strip("/")
            if is_alike and _writers(other, off) and not set(other.consumers) - off:
                names = " and ".join(_writers(other, off))
                faults[place.part] = f"{place.file}: {_beside_text(read, other, names)}"
    return faults


def _beside_text(read: QueuePlace, other: QueuePlace, writers: str) -> str:
    return (
        f"it reads the queue {read.manifest_path} in {read.store}, to which no part writes; {writers} writes "
        f"to that of {other.store}, which no part reads: use ${{{DATA_DIR_VARIABLE}}} in the file for the "
        "data directory of `penstock up`"
    )


def _writers(queue: QueuePlace, off: set[str]) -> list[str]:
    return [part for part in queue.producers if part not in off]


def database_faults(plan: Plan, disabled: Iterable[str]) -> dict[str, str]:
    """Return the errors in the settings of databases, keyed by the part's name."""
    off, faults = set(disabled), {}
    for part in plan.parts:
        check = _DATABASES.get(part.kind)
        if check is not None and part.name not in off:
            try:
                check(plan)
            except ConfigError as error:
                faults[part.name] = str(error)
    return faults


def _check_timeseries(plan: Plan) -> None:
    from penstock.timeseries import TimeSeriesConfig

    own = plan.settings.timeseries
    if own is not None and own.config is not None:
        file = plan.layout.path(own.config)
        TimeSeriesConfig.from_mapping(load_mapping(file), where=file)


def _check_vector(plan: Plan) -> None:
    from penstock.vector import VectorConfig

    own = plan.settings.vector
    if own is None:
        return
    file = None if own.config is None else plan.layout.path(own.config)
    flags: dict[str, Setting] = {"store": "file:///", "dimensions": own.dimensions, "metric": own.metric}
    given = {key: value for key, value in flags.items() if value is not None}
    VectorConfig.from_mapping(merge(load_mapping(file) if file else {}, given), where=file or "vector")


_DATABASES: Final = {PartKind.TIMESERIES: _check_timeseries, PartKind.VECTOR: _check_vector}


def _is_ours(plan: Plan, part: PartPlan) -> bool:
    """Return whether the part runs the default file, which does not exist yet."""
    return part.file == plan.layout.inner("pipelines", "events.yaml") and not os.path.exists(part.file)


def with_places(plan: Plan, disabled: Iterable[str]) -> Plan:
    """Add the information in the parts' files to the plan: Quiver's directories and the queues in use."""
    off = set(disabled)
    known = {queue.name: queue for queue in plan.map.queues}
    quivers: tuple[QuiverPlace, ...] = ()
    part = _collector_part(plan, off)
    if part is not None:
        try:
            own = _collector_plan(plan)
        except ConfigError:
            pass  # reported as a fault
        else:
            quivers = _quivers(own, part)
            _add_exports(known, own, part)
            plan = _with_probe(plan, part, own)
    places = _without(plan.map, off)
    specs = _specs(places)
    pipelines = tuple(_with_queue(place, specs.get(place.part), known) for place in places.pipelines)
    _add_sinks(known, specs)
    places = replace(places, queues=tuple(known.values()), quivers=quivers, pipelines=pipelines)
    return replace(plan, map=places)


def _with_probe(plan: Plan, part: PartPlan, own: CollectorPlan) -> Plan:
    """Add the probe of a collector with the user's own file, if the file sets its address."""
    address = own.telemetry.address
    if part.probe is not None or address is None or not address.port:
        return plan
    probed = replace(part, address=str(address), probe=Probe(path="/ready"))
    return replace(plan, parts=tuple(probed if one is part else one for one in plan.parts))


def _without(places: FleetMap, off: set[str]) -> FleetMap:
    """Remove parts that do not run from the map."""
    return replace(
        places,
        topics=None if places.topics is None or places.topics.part in off else places.topics,
        relays=tuple(place for place in places.relays if place.part not in off),
        pipelines=tuple(place for place in places.pipelines if place.part not in off),
        databases=tuple(place for place in places.databases if place.part not in off),
    )


def _collector_part(plan: Plan, disabled: Iterable[str]) -> PartPlan | None:
    parts = [part for part in plan.parts if part.kind is PartKind.COLLECTOR and part.name not in disabled]
    return parts[0] if parts and missing_extra(PartKind.COLLECTOR) is None else None


def _collector_plan(plan: Plan) -> CollectorPlan:
    from penstock.collector import load_plan, parse_plan

    assert plan.collector_file is not None
    if plan.collector_text is not None:
        return parse_plan(plan.collector_text, os.environ, where="collector")
    return load_plan(plan.collector_file, os.environ)


def _quivers(own: CollectorPlan, part: PartPlan) -> tuple[QuiverPlace, ...]:
    nodes = [node for node in own.graph.nodes.values() if node.plugin.name == "persistence"]
    return tuple(
        QuiverPlace(
            name=node.name,
            part=part.name,
            path=str(Path(own.persistence(node).quiver.path).absolute()),
            cores=own.cores,
            budget_bytes=own.persistence(node).quiver.retention.cap_bytes,
        )
        for node in nodes
    )


def _add_exports(known: dict[str, QueuePlace], own: CollectorPlan, part: PartPlan) -> None:
    """Add the queues that the collector's exporters write to."""
    from penstock.collector import BufferSettings

    for node in own.graph.nodes.values():
        settings = own.settings[node.name]
        if not isinstance(settings, BufferSettings):
            continue
        for signal in ("metrics", "traces", "logs"):
            manifest = settings.manifest_path.replace("{signal}", signal)
            place = _found(known, settings.store, manifest)
            if place is None:
                name = signal if signal not in known else f"{node.name}-{signal}"
                prefix = settings.data_path_prefix.replace("{signal}", signal)
                place = QueuePlace(
                    name=name, store=settings.store, manifest_path=manifest, data_path_prefix=prefix
                )
            if part.name not in place.producers:
                place = replace(place, producers=(*place.producers, part.name))
            known[place.name] = place


def _specs(places: FleetMap) -> dict[str, PipelineSpec]:
    """Return the pipelines with valid files, keyed by the part's name. The others are reported as faults."""
    found = {}
    for place in places.pipelines:
        with contextlib.suppress(ConfigError):
            found[place.part] = _read_pipeline(place.file, places.data_dir)
    return found


def _add_sinks(known: dict[str, QueuePlace], specs: Mapping[str, PipelineSpec]) -> None:
    """Add pipelines as producers of the known queues that they write to."""
    if not specs:
        return  # without pipelines, Spark need not be imported
    from penstock.spark import BufferSinkSpec

    for part, spec in specs.items():
        for sink in spec.outputs.values():
            if isinstance(target := sink.target, BufferSinkSpec):
                place = _found(known, target.store, target.manifest_path)
                if place is not None and part not in place.producers:
                    known[place.name] = replace(place, producers=(*place.producers, part))


def _with_queue(
    place: PipelinePlace, spec: PipelineSpec | None, known: dict[str, QueuePlace]
) -> PipelinePlace:
    """Add the queue that the pipeline's file reads to the known queues, and return the pipeline with it."""
    if spec is None:
        return place
    source = spec.source.buffer
    queue = _found(known, source.store, source.manifest_path) or _queue_of(place.name, source, known)
    known[queue.name] = replace(queue, consumers=(*queue.consumers, place.part))
    return replace(place, queue=queue.name)


def _queue_of(name: str, source: BufferSourceSpec, known: Mapping[str, QueuePlace]) -> QueuePlace:
    return QueuePlace(
        name=name if name not in known else f"pipeline-{name}",
        store=source.store,
        manifest_path=source.manifest_path,
        data_path_prefix=source.data_path_prefix,
        store_options=source.store_options,
    )


def _found(known: Mapping[str, QueuePlace], store: str, manifest: str) -> QueuePlace | None:
    where = (_address(store), manifest.strip("/"))
    return next(
        (
            place
            for place in known.values()
            if (_address(place.store), place.manifest_path.strip("/")) == where
        ),
        None,
    )


def _address(store: str) -> str:
    address = StoreAddress.parse(store)
    return os.path.abspath(os.path.expanduser(address.path)) if address.scheme == "file" else address.url
