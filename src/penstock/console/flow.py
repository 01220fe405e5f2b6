"""The picture of the flow: what feeds what, and how it goes. Pure.

A figure that is not known is null, never zero: an edge whose part is down, or that could not be looked at,
has `known` false and no rates. What durable state alone tells, such as a backlog, stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.console.seam import Part, PartState, Plan

__all__ = ["Edge", "EdgeKey", "Figures", "Flow", "Node", "flow_of"]

EdgeKey: TypeAlias = tuple[str, str, str]
"""From, to (ids of nodes), and the part that carries."""

_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was read about one edge. `error` says why something of it is not known."""

    rate_records_s: float | None = None
    rate_bytes_s: float | None = None
    backlog: int | None = None
    backlog_unit: str = "records"
    lag_s: float | None = None
    error: str | None = None
    is_read: bool = True
    """False: nothing could be read, and `error` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A box of the picture. `state` is the part's; of what is only stored, `ready` or `unknown`."""

    id: str
    kind: str
    label: str
    part: str | None
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An arrow of the picture, and who carries the records along it."""

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
        """As the API shows it."""
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
class Flow:
    """All of the picture."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]

    def fields(self) -> dict[str, object]:
        """As the API shows it."""
        return {"nodes": self.nodes, "edges": [edge.fields() for edge in self.edges]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrow:
    source: str
    target: str
    part: str
    label: str = ""


def flow_of(
    plan: Plan,
    parts: Sequence[Part],
    figures: Mapping[EdgeKey, Figures],
    stored: Mapping[str, bool],
    sinks: Mapping[str, Sequence[tuple[str, str]]],
) -> Flow:
    """The picture of a plan.

    `stored` tells of each node that is no process whether it could be read; `sinks` are the (name, kind) of
    what each pipeline writes, as far as known.
    """
    known = {part.name: part for part in parts}
    nodes = list(_nodes(plan, known, stored, sinks))
    edges = [_edge(arrow, known, figures) for arrow in _arrows(plan, sinks)]
    return Flow(nodes=nodes, edges=edges)


def _nodes(
    plan: Plan,
    parts: Mapping[str, Part],
    stored: Mapping[str, bool],
    sinks: Mapping[str, Sequence[tuple[str, str]]],
) -> Iterator[Node]:
    def process(ident: str, kind: str, label: str, part: str) -> Node:
        state = parts[part].state.value if part in parts else _UNKNOWN
        return Node(id=ident, kind=kind, label=label, part=part, state=state)

    def place(ident: str, kind: str, label: str) -> Node:
        state = PartState.READY.value if stored.get(ident) else _UNKNOWN
        return Node(id=ident, kind=kind, label=label, part=None, state=state)

    if plan.topics is not None:
        yield Node(id="clients", kind="clients", label="services, jobs", part=None, state="ready")
        yield process("topics", "topics", "topics", plan.topics.part)
    if plan.collector is not None:
        yield Node(id="otlp", kind="clients", label="OpenTelemetry", part=None, state="ready")
        yield process("collector", "collector", "collector", plan.collector.part)
    for quiver in plan.quivers:
        yield place(f"quiver:{quiver.name}", "quiver", quiver.name)
    for queue in plan.queues:
        yield place(f"queue:{queue.name}", "queue", queue.name)
    for pipeline in plan.pipelines:
        yield process(f"pipeline:{pipeline.name}", "pipeline", pipeline.name, pipeline.part)
        for name, kind in sinks.get(pipeline.name, ()):
            yield place(f"sink:{pipeline.name}/{name}", kind, name)
    for database in plan.databases:
        yield process(f"database:{database.name}", database.kind, database.name, database.part)


def _arrows(plan: Plan, sinks: Mapping[str, Sequence[tuple[str, str]]]) -> Iterator[_Arrow]:
    if plan.topics is not None:
        yield _Arrow(source="clients", target="topics", part=plan.topics.part)
    for relay in plan.relays:
        yield _Arrow(
            source="topics", target=f"queue:{relay.queue}", part=relay.part, label=f"relay of {relay.topic}"
        )
    if plan.collector is not None:
        part = plan.collector.part
        yield _Arrow(source="otlp", target="collector", part=part)
        for quiver in plan.collector.quivers:
            yield _Arrow(source="collector", target=f"quiver:{quiver}", part=part)
        one = plan.collector.quivers[0] if len(plan.collector.quivers) == 1 else None
        for queue in plan.collector.queues:
            source = "collector" if one is None else f"quiver:{one}"
            yield _Arrow(source=source, target=f"queue:{queue}", part=part, label="exporter")
    for pipeline in plan.pipelines:
        node = f"pipeline:{pipeline.name}"
        if pipeline.queue is not None:
            yield _Arrow(source=f"queue:{pipeline.queue}", target=node, part=pipeline.part)
        for name, _ in sinks.get(pipeline.name, ()):
            yield _Arrow(source=node, target=f"sink:{pipeline.name}/{name}", part=pipeline.part)
    for database in plan.databases:
        if database.queue is not None:
            yield _Arrow(
                source=f"queue:{database.queue}", target=f"database:{database.name}", part=database.part
            )


def _edge(arrow: _Arrow, parts: Mapping[str, Part], figures: Mapping[EdgeKey, Figures]) -> Edge:
    part = parts.get(arrow.part)
    is_up = part is None or part.state is PartState.READY
    read = figures.get((arrow.source, arrow.target, arrow.part), Figures(is_read=False))
    known = is_up and read.is_read
    error = read.error
    if part is not None and not is_up:  # of one that is well again, the last error is over
        error = part.last_error or error or f"{part.name} is {part.state.value}"
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
