"""The graph of the data flow, with the figures of its edges. Pure.

An unknown figure is null, never zero. An edge whose part is down, or that could not be read, has no rates and
`known` is false. Figures from durable state, such as a backlog, are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.up import CollectorPlace, FleetMap, PartState, PartStatus, reachable

EdgeKey: TypeAlias = tuple[str, str, str]
"""The ids of the source and target node, and the part that moves the records."""

_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of an edge. `error` is the reason for unknown ones."""

    rate_records_s: float | None = None
    rate_bytes_s: float | None = None
    backlog: int | None = None
    backlog_unit: str = "records"
    lag_s: float | None = None
    error: str | None = None
    is_read: bool = True
    """False if nothing could be read. `error` is then the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the graph. `state` is the state of its part, or without a part `ready` or `unknown`."""

    id: str
    kind: str
    label: str
    part: str | None
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An edge of the graph, with the part that moves the records."""

    source: str
    target: str
    part: str
    label: str
    rate_records_s: float | None
    rate_bytes_s: float | None
    backlog: int | None
    backlog_unit: str
    lag_s: float | None
    last_error: str | None
    known: bool

    def fields(self) -> dict[str, object]:
        """Return the edge as the API shows it."""
        return {
            "from": self.source,
            "to": self.target,
            "part": self.part,
            "label": self.label,
            "rate_records_s": self.rate_records_s,
            "rate_bytes_s": self.rate_bytes_s,
            "backlog": self.backlog,
            "backlog_unit": self.backlog_unit,
            "lag_s": self.lag_s,
            "last_error": self.last_error,
            "known": self.known,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The whole graph."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]

    def fields(self) -> dict[str, object]:
        """Return the graph as the API shows it."""
        return {"nodes": self.nodes, "edges": [edge.fields() for edge in self.edges]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrow:
    source: str
    target: str
    part: str
    label: str = ""


def state_of(part: PartStatus) -> str:
    """Return a part's state as the API shows it. A part that is stopping is shown as not ready."""
    text: str = part.state.value
    return PartState.NOT_READY.value if part.state is PartState.STOPPING else text


def url_of(part: PartStatus | None) -> str | None:
    """Return the base URL of a part, if its address is known."""
    return None if part is None or part.address is None else f"http://{reachable(part.address)}"


def topology_of(
    places: FleetMap,
    collector: CollectorPlace | None,
    parts: Sequence[PartStatus],
    figures: Mapping[EdgeKey, Figures],
    stored: Mapping[str, bool],
    sinks: Mapping[str, Sequence[tuple[str, str]]],
) -> Topology:
    """Return the graph of a fleet.

    `stored` maps each node without a process to whether it could be read. `sinks` maps each pipeline to its
    known sinks as (name, kind).
    """
    known = {part.name: part for part in parts}
    nodes = list(_nodes(places, collector, known, stored, sinks))
    edges = [_edge(arrow, known, figures) for arrow in _arrows(places, collector, sinks)]
    return Topology(nodes=nodes, edges=edges)


def _nodes(
    places: FleetMap,
    collector: CollectorPlace | None,
    parts: Mapping[str, PartStatus],
    stored: Mapping[str, bool],
    sinks: Mapping[str, Sequence[tuple[str, str]]],
) -> Iterator[Node]:
    def process(ident: str, kind: str, label: str, part: str) -> Node:
        state = state_of(parts[part]) if part in parts else _UNKNOWN
        return Node(id=ident, kind=kind, label=label, part=part, state=state)

    def place(ident: str, kind: str, label: str) -> Node:
        state = PartState.READY.value if stored.get(ident) else _UNKNOWN
        return Node(id=ident, kind=kind, label=label, part=None, state=state)

    if places.topics is not None:
        yield Node(id="clients", kind="clients", label="services, jobs", part=None, state="ready")
        yield process("topics", "topics", "topics", places.topics.part)
    if collector is not None:
        yield Node(id="otlp", kind="clients", label="OpenTelemetry", part=None, state="ready")
        yield process("collector", "collector", "collector", collector.part)
    for quiver in places.quivers:
        yield place(f"quiver:{quiver.name}", "quiver", quiver.name)
    for queue in places.queues:
        yield place(f"queue:{queue.name}", "queue", queue.name)
    for pipeline in places.pipelines:
        yield process(f"pipeline:{pipeline.name}", "pipeline", pipeline.name, pipeline.part)
        for name, kind in sinks.get(pipeline.name, ()):
            yield place(f"sink:{pipeline.name}/{name}", kind, name)
    for database in places.databases:
        yield process(f"database:{database.name}", database.kind.value, database.name, database.part)


def _arrows(
    places: FleetMap, collector: CollectorPlace | None, sinks: Mapping[str, Sequence[tuple[str, str]]]
) -> Iterator[_Arrow]:
    if places.topics is not None:
        yield _Arrow(source="clients", target="topics", part=places.topics.part)
    for relay in places.relays:
        yield _Arrow(
            source="topics", target=f"queue:{relay.queue}", part=relay.part, label=f"relay of {relay.topic}"
        )
    if collector is not None:
        part = collector.part
        yield _Arrow(source="otlp", target="collector", part=part)
        for quiver in collector.quivers:
            yield _Arrow(source="collector", target=f"quiver:{quiver}", part=part)
        one = collector.quivers[0] if len(collector.quivers) == 1 else None
        for queue in collector.queues:
            source = "collector" if one is None else f"quiver:{one}"
            yield _Arrow(source=source, target=f"queue:{queue}", part=part, label="exporter")
    for pipeline in places.pipelines:
        node = f"pipeline:{pipeline.name}"
        if pipeline.queue is not None:
            yield _Arrow(source=f"queue:{pipeline.queue}", target=node, part=pipeline.part)
        for name, _ in sinks.get(pipeline.name, ()):
            yield _Arrow(source=node, target=f"sink:{pipeline.name}/{name}", part=pipeline.part)
    for database in places.databases:
        if database.queue is not None:
            yield _Arrow(
                source=f"queue:{database.queue}", target=f"database:{database.name}", part=database.part
            )


def _edge(arrow: _Arrow, parts: Mapping[str, PartStatus], figures: Mapping[EdgeKey, Figures]) -> Edge:
    part = parts.get(arrow.part)
    is_up = part is None or part.state is PartState.READY
    read = figures.get((arrow.source, arrow.target, arrow.part), Figures(is_read=False))
    known = is_up and read.is_read
    error = read.error
    if part is not None and not is_up:  # a recovered part shows no error
        error = part.last_error or error or f"{part.name} is {state_of(part)}"
    return Edge(
        source=arrow.source,
        target=arrow.target,
        part=arrow.part,
        label=arrow.label,
        rate_records_s=_rounded(read.rate_records_s) if known else None,
        rate_bytes_s=_rounded(read.rate_bytes_s) if known else None,
        backlog=read.backlog,
        backlog_unit=read.backlog_unit,
        lag_s=_rounded(read.lag_s) if known else None,
        last_error=error,
        known=known,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
