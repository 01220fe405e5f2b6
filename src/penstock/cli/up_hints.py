"""What people read first: where a part is, and a line to try it with."""

from __future__ import annotations

from penstock.up import FleetMap, PartKind, PartStatus, Plan, address_of, reachable

__all__ = ["hint_of"]


def hint_of(plan: Plan, part: PartStatus) -> str | None:
    """How to use a part that is ready; None if there is nothing to say."""
    here = f"http://{reachable(part.address)}" if part.address else ""
    if part.kind is PartKind.TOPICS and here:
        return _write_an_event(plan.map, here)
    if part.kind is PartKind.COLLECTOR:
        ports = plan.part(part.name).ports
        if "collector.grpc_port" not in ports:
            return None
        where = reachable(address_of(*ports["collector.grpc_port"]))
        return f"send telemetry: OTEL_EXPORTER_OTLP_ENDPOINT=http://{where}"
    if part.kind is PartKind.TIMESERIES and here:
        return f"ask for a series: curl '{here}/api/v1/query?query=NAME'"
    if part.kind is PartKind.VECTOR and here:
        return f"search vectors: POST {here}/api/v1/vector/search"
    if part.kind is PartKind.PIPELINE:
        files = [place.file for place in plan.map.pipelines if place.part == part.name]
        return f"how its records go into its tables: {files[0]}" if files else None
    return None


def _write_an_event(places: FleetMap, here: str) -> str:
    topic = places.relays[0].topic if places.relays else "events"
    key = " -H 'Authorization: Bearer KEY'" if places.topics is not None and places.topics.key else ""
    body = """-H 'Content-Type: application/json' -d '{"records":[{"data":{"hello":1}}]}'"""
    return f"write an event: curl -X POST {here}/v0/topics/{topic}{key} {body}"
