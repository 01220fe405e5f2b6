"""What the files of parts say: whether they can run, and where they keep things."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.pipeline_file import read_pipeline
from penstock.cli.up_extras import missing_extra
from penstock.config import Setting, load_mapping, merge
from penstock.errors import ConfigError
from penstock.objects.settings import StoreAddress
from penstock.services.fleet.parts import PartPlan, Plan, Probe
from penstock.services.fleet.status import FleetMap, PartKind, PipelinePlace, QueuePlace, QuiverPlace
from penstock.units import parse_size

if TYPE_CHECKING:
    from penstock.collector.plan import Plan as CollectorPlan
    from penstock.spark.pipeline.spec import BufferSourceSpec

__all__ = ["collector_faults", "database_faults", "pipeline_faults", "with_places"]


def collector_faults(plan: Plan, disabled: Iterable[str]) -> dict[str, str]:
    """What is wrong with the collector's file, by the part's name."""
    part = _collector_part(plan, disabled)
    if part is None:
        return {}
    try:
        _collector_plan(plan)
    except ConfigError as error:
        return {part.name: str(error)}
    return {}


def pipeline_faults(plan: Plan, disabled: Iterable[str]) -> dict[str, str]:
    """What is wrong with pipelines' files, by the part's name."""
    off, faults = set(disabled), {}
    for part in plan.parts:
        if part.kind is PartKind.PIPELINE and part.name not in off and not _is_ours(plan, part):
            try:
                read_pipeline(Path(part.file or ""))
            except ConfigError as error:
                faults[part.name] = str(error)
    return faults


def database_faults(plan: Plan, disabled: Iterable[str]) -> dict[str, str]:
    """What is wrong with the settings that databases are given, by the part's name."""
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
    """Whether the file is the one that is written when it is not there."""
    return part.file == plan.layout.inner("pipelines", "events.yaml") and not os.path.exists(part.file)


def with_places(plan: Plan, disabled: Iterable[str]) -> Plan:
    """The plan with what the files of its parts tell: Quiver's directories, and the queues they use."""
    off = set(disabled)
    known = {queue.name: queue for queue in plan.map.queues}
    quivers: tuple[QuiverPlace, ...] = ()
    part = _collector_part(plan, off)
    if part is not None:
        try:
            own = _collector_plan(plan)
        except ConfigError:
            pass  # it is told as a fault
        else:
            quivers = _quivers(own, part)
            _add_exports(known, own, part)
            plan = _with_probe(plan, part, own)
    places = _without(plan.map, off)
    pipelines = tuple(_with_queue(place, known) for place in places.pipelines)
    places = replace(places, queues=tuple(known.values()), quivers=quivers, pipelines=pipelines)
    return replace(plan, map=places)


def _with_probe(plan: Plan, part: PartPlan, own: CollectorPlan) -> Plan:
    """A collector of one's own file is probed where that says that it listens for it."""
    address = own.telemetry.address
    if part.probe is not None or address is None or not address.port:
        return plan
    probed = replace(part, address=str(address), probe=Probe(path="/ready"))
    return replace(plan, parts=tuple(probed if one is part else one for one in plan.parts))


def _without(places: FleetMap, off: set[str]) -> FleetMap:
    """Parts that do not run have no place."""
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
    from penstock.collector.plan import load_plan, parse_plan

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
            budget_bytes=parse_size(own.persistence(node).quiver.retention.size_cap),
        )
        for node in nodes
    )


def _add_exports(known: dict[str, QueuePlace], own: CollectorPlan, part: PartPlan) -> None:
    """The queues that the collector's exporters append to."""
    from penstock.collector.settings import BufferSettings

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


def _with_queue(place: PipelinePlace, known: dict[str, QueuePlace]) -> PipelinePlace:
    """The pipeline with the queue that its file reads, which becomes one of the fleet's."""
    try:
        spec = read_pipeline(Path(place.file))
    except ConfigError:
        return place  # it is told as a fault, or the file is written before it runs
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
