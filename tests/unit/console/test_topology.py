"""The graph of the flow: unknown figures are null, never zero."""

from __future__ import annotations

from tests.unit.console.hosts import part

from penstock.console.topology import (
    Edge,
    Figures,
    Topology,
    state_of,
    topology_of,
)
from penstock.up import (
    CollectorPlace,
    DatabasePlace,
    FleetMap,
    PartKind,
    PartState,
    PartStatus,
    QueuePlace,
    QuiverPlace,
    RelayPlace,
    TopicsPlace,
)

PLACES = FleetMap(
    data_dir="/data",
    topics=TopicsPlace(part="topics", data_dir="/data/topics"),
    queues=(
        QueuePlace(
            name="q", store="memory://q", manifest_path="m", data_path_prefix="d", producers=("collector",)
        ),
    ),
    relays=(
        RelayPlace(part="relay-a", topic="a", queue="q", app="relay:a"),
        RelayPlace(part="relay-b", topic="b", queue="q", app="relay:b"),
    ),
    quivers=(QuiverPlace(name="v", part="collector", path="/v"),),
    databases=(DatabasePlace(name="d", kind=PartKind.VECTOR, part="vector", store="", queue="q"),),
)
COLLECTOR = CollectorPlace(part="collector", quivers=("v",), queues=("q",))
FIGURES = {
    ("topics", "queue:q", "relay-a"): Figures(rate_records_s=1.23456, backlog=7, lag_s=2.0),
    ("topics", "queue:q", "relay-b"): Figures(rate_records_s=9.0, backlog=0, lag_s=0.0),
}


def picture(*parts: PartStatus) -> Topology:
    return topology_of(PLACES, COLLECTOR, parts, FIGURES, {"queue:q": True}, {})


def edge(flow: Topology, name: str) -> Edge:
    return next(one for one in flow.edges if one.part == name)


def test_a_part_that_is_up_has_figures() -> None:
    found = edge(picture(part("relay-a")), "relay-a")
    assert (found.known, found.rate_records_s, found.backlog) == (True, 1.235, 7)


def test_a_part_that_is_down_has_no_rates_and_a_reason() -> None:
    found = edge(picture(part("relay-a", PartState.FAILED, "exit 3")), "relay-a")
    assert (found.known, found.rate_records_s, found.lag_s) == (False, None, None)
    assert found.last_error == "exit 3"
    assert found.backlog == 7


def test_unread_figures_are_unknown() -> None:
    found = edge(picture(part("vector")), "vector")
    assert (found.known, found.backlog, found.rate_records_s) == (False, None, None)


def test_two_relays_into_one_queue_have_an_edge_each() -> None:
    flow = picture(part("relay-a"), part("relay-b"))
    assert [edge(flow, name).backlog for name in ("relay-a", "relay-b")] == [7, 0]


def test_states_of_nodes_are_those_of_their_parts() -> None:
    flow = picture(part("topics", PartState.RESTARTING))
    states = {node.id: node.state for node in flow.nodes}
    assert states["topics"] == "restarting"
    assert states["queue:q"] == "ready"
    assert states["quiver:v"] == "unknown"
    assert states["database:d"] == "unknown"


def test_every_edge_connects_two_nodes() -> None:
    flow = picture()
    nodes = {node.id for node in flow.nodes}
    assert all({one.source, one.target} <= nodes for one in flow.edges)
    assert ("quiver:v", "queue:q") in {(one.source, one.target) for one in flow.edges}


def test_a_part_that_has_recovered_shows_no_earlier_error() -> None:
    found = edge(picture(part("relay-a", PartState.READY, "exit 3")), "relay-a")
    assert (found.known, found.last_error) == (True, None)


def test_a_collector_that_does_not_run_has_no_place() -> None:
    assert PLACES.collector([part("topics"), part("collector")]) == COLLECTOR
    assert PLACES.collector([part("collector", PartState.DISABLED)]) is None


def test_a_part_that_is_stopping_is_shown_as_not_ready() -> None:
    assert state_of(part("topics", PartState.STOPPING)) == "not_ready"
    for state in set(PartState) - {PartState.STOPPING}:
        assert state_of(part("topics", state)) == state.value
