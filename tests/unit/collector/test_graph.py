"""The graph of nodes: which run, which are refused with which message, and which cause a warning."""

from __future__ import annotations

import copy

import pytest

from penstock.collector.config import fill
from penstock.collector.graph import DispatchStrategy, Kind, Plugin, parse_graph, parse_urn
from penstock.errors import ConfigError

NODES: dict[str, dict[str, object]] = {
    "in": {
        "kind": "receiver",
        "plugin_urn": "urn:otel:otlp:receiver",
        "out_ports": {"out_port": {"destinations": ["keep"], "dispatch_strategy": "round_robin"}},
        "config": {"listening_addr": "127.0.0.1:4317"},
    },
    "keep": {
        "kind": "processor",
        "plugin_urn": "urn:otap:processor:persistence",
        "out_ports": {"out_port": {"destinations": ["out"]}},
        "config": {"path": "data"},
    },
    "out": {"kind": "exporter", "plugin_urn": "urn:otel:exporter:noop"},
}


def changed(**nodes: object) -> dict[str, object]:
    merged: dict[str, object] = copy.deepcopy(NODES)
    for name, change in nodes.items():
        if isinstance(change, dict) and name in merged:
            merged[name] = {**merged[name], **change}  # type: ignore[dict-item]
        else:
            merged[name] = change
    return merged


@pytest.mark.parametrize("urn", ["urn:otel:otlp:receiver", "urn:otap:receiver:otlp"])
def test_both_spellings_of_a_urn_name_the_same_plugin(urn: str) -> None:
    assert parse_urn(urn, "here") == Plugin(Kind.RECEIVER, "otlp")


@pytest.mark.parametrize(
    ("urn", "words"),
    [
        ("otlp:receiver", "not a plugin URN"),
        ("urn:otel:otlp:sender", "has no kind"),
        ("urn:otel:otpl:exporter", "did you mean 'otlp'"),
        ("urn:otel::receiver", "not a plugin URN"),
    ],
)
def test_the_error_for_a_wrong_urn_explains_it(urn: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_urn(urn, "here")


def test_a_graph_knows_the_sources_of_each_node() -> None:
    graph = parse_graph(NODES, where="file")
    assert [node.name for node in graph.feeding("keep")] == ["in"]
    assert graph.nodes["in"].dispatch_strategy is DispatchStrategy.ROUND_ROBIN
    assert graph.warnings() == []


def test_an_unknown_destination_names_the_nearest_node() -> None:
    nodes = changed(**{"in": {"out_ports": {"p": {"destinations": ["kep"]}}}})
    with pytest.raises(ConfigError, match="no node is called 'kep'; did you mean 'keep'"):
        parse_graph(nodes, where="file")


def test_the_error_for_a_cycle_shows_it() -> None:
    nodes = changed(keep={"out_ports": {"p": {"destinations": ["again"]}}})
    nodes["again"] = {**NODES["keep"], "out_ports": {"p": {"destinations": ["keep"]}}}
    with pytest.raises(ConfigError, match="keep -> again -> keep"):
        parse_graph(nodes, where="file")


def test_a_receiver_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a port with at least one destination"):
        parse_graph(changed(**{"in": {"out_ports": {}}}), where="file")


def test_an_exporter_with_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="an exporter has no ports"):
        parse_graph(changed(out={"out_ports": {"p": {"destinations": ["keep"]}}}), where="file")


def test_a_receiver_cannot_be_a_destination() -> None:
    with pytest.raises(ConfigError, match="'in' is a receiver"):
        parse_graph(changed(keep={"out_ports": {"p": {"destinations": ["in"]}}}), where="file")


def test_a_kind_that_contradicts_its_urn_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind is processor"):
        parse_graph(changed(out={"kind": "processor"}), where="file")


def test_an_unknown_key_of_a_node_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'out_ports'"):
        parse_graph(changed(**{"in": {"out_port": {}}}), where="file")


def test_otap_nodes_are_left_out_with_a_warning_and_the_rest_runs() -> None:
    nodes = changed(keep={"out_ports": {"p": {"destinations": ["otap", "out"]}}})
    nodes["otap"] = {"kind": "exporter", "plugin_urn": "urn:otel:otap:exporter", "config": {}}
    graph = parse_graph(nodes, where="file")
    assert [node.name for node in graph.left_out] == ["otap"]
    assert graph.nodes["keep"].destinations == ("out",)
    assert "not implemented" in graph.warnings()[0]


def test_a_node_that_would_only_feed_otap_is_refused() -> None:
    nodes = changed(keep={"out_ports": {"p": {"destinations": ["otap"]}}})
    nodes["otap"] = {"kind": "exporter", "plugin_urn": "urn:otel:otap:exporter", "config": {}}
    with pytest.raises(ConfigError, match="its data has no destination"):
        parse_graph(nodes, where="file")


def test_a_node_without_a_source_causes_a_warning() -> None:
    nodes = changed(spare={"kind": "exporter", "plugin_urn": "urn:otel:noop:exporter"})
    assert "spare" in parse_graph(nodes, where="file").warnings()[0]


def test_variables_are_replaced_once() -> None:
    settings = {"a": "http://{{ host }}:1", "b": [{"c": "{{host}}{{port}}"}], "d": 3}
    filled = fill(settings, {"host": "{{port}}", "port": "9"}, where="file")
    assert filled == {"a": "http://{{port}}:1", "b": [{"c": "{{port}}9"}], "d": 3}


def test_an_undefined_variable_is_named_with_its_location() -> None:
    with pytest.raises(ConfigError, match=r"file: a\.b: the variable 'hots' is not set.*did you mean 'host'"):
        fill({"a": {"b": "{{hots}}"}}, {"host": "x"}, where="file")
