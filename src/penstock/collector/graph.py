"""The graph of nodes in a configuration. It is validated completely, without I/O, before a port is bound.

The parts of a plugin name may be in either order: `urn:otel:otlp:receiver` or `urn:otap:receiver:otlp`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.config import Setting, build, closest
from penstock.errors import ConfigError


class Kind(enum.StrEnum):
    """The role of a node."""

    RECEIVER = "receiver"
    PROCESSOR = "processor"
    EXPORTER = "exporter"


@dataclass(frozen=True, slots=True)
class Plugin:
    """The implementation of a node."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.kind.value}"


PLUGINS: Final = frozenset(
    {
        Plugin(Kind.RECEIVER, "otlp"),
        Plugin(Kind.RECEIVER, "otap"),
        Plugin(Kind.PROCESSOR, "persistence"),
        Plugin(Kind.EXPORTER, "otlp"),
        Plugin(Kind.EXPORTER, "otap"),
        Plugin(Kind.EXPORTER, "buffer"),
        Plugin(Kind.EXPORTER, "file"),
        Plugin(Kind.EXPORTER, "parquet"),
        Plugin(Kind.EXPORTER, "debug"),
        Plugin(Kind.EXPORTER, "noop"),
        Plugin(Kind.EXPORTER, "flaky"),
    }
)
_KINDS: Final = frozenset(kind.value for kind in Kind)


def parse_urn(text: str, place: str) -> Plugin:
    """Parse the URN of a plugin: any namespace, then kind and name in either order.

    Raise `ConfigError` for anything else. For an unknown plugin the error suggests the nearest name.
    """
    parts = text.split(":")
    if len(parts) != 4 or parts[0] != "urn" or not all(parts):
        raise ConfigError(
            f"{place}: {text!r} is not a plugin URN: use urn:otel:NAME:KIND or urn:otel:KIND:NAME; KIND "
            f"is {', '.join(sorted(_KINDS))}"
        )
    first, second = parts[2], parts[3]
    if second in _KINDS and not (first in _KINDS and second not in _KINDS):
        plugin = Plugin(Kind(second), first)
    elif first in _KINDS:
        plugin = Plugin(Kind(first), second)
    else:
        raise ConfigError(f"{place}: {text!r} has no kind: add one of {', '.join(sorted(_KINDS))}")
    if plugin not in PLUGINS:
        raise _unknown(plugin, place)
    return plugin


def _unknown(plugin: Plugin, place: str) -> ConfigError:
    names = sorted(known.name for known in PLUGINS if known.kind is plugin.kind)
    near = closest(plugin.name, names)
    hint = f"did you mean {near!r}?" if near else f"expected one of {', '.join(names)}"
    return ConfigError(f"{place}: no {plugin.kind.value} is called {plugin.name!r}; {hint}")


_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class DispatchStrategy(enum.StrEnum):
    """How data is distributed to several destinations."""

    ROUND_ROBIN = "round_robin"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    destinations: tuple[str, ...]
    dispatch_strategy: DispatchStrategy = DispatchStrategy.ROUND_ROBIN


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeSettings:
    kind: Kind
    plugin_urn: str
    out_ports: dict[str, _Port] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, with the destinations of all its ports in the order of the file."""

    name: str
    plugin: Plugin
    destinations: tuple[str, ...]
    dispatch_strategy: DispatchStrategy
    config: Mapping[str, Setting] = field(repr=False)
    """The settings as given in the file, including secrets."""

    @property
    def kind(self) -> Kind:
        return self.plugin.kind

    @property
    def is_built(self) -> bool:
        """Whether the plugin is implemented. OTAP is only accepted in settings."""
        return self.plugin.name != "otap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The nodes that run, and those that are left out because they are not implemented."""

    nodes: Mapping[str, Node]
    left_out: tuple[Node, ...] = ()

    def of_kind(self, kind: Kind) -> list[Node]:
        return [node for node in self.nodes.values() if node.kind is kind]

    def feeding(self, name: str) -> list[Node]:
        """Return the nodes that send data to the node `name`."""
        return [node for node in self.nodes.values() if name in node.destinations]

    def warnings(self) -> list[str]:
        """Return warnings about a configuration that can run."""
        warnings = [
            f"{node.name}: the {node.plugin} is not implemented; the node is left out, and all others run"
            for node in self.left_out
        ]
        warnings += [
            f"{node.name}: no node names it as a destination, so it receives no data"
            for node in self.nodes.values()
            if node.kind is not Kind.RECEIVER and not self.feeding(node.name)
        ]
        return warnings


def parse_graph(nodes: Mapping[str, Setting], *, where: str) -> Graph:
    """Return the graph of a `nodes` mapping. Raise `ConfigError` for the first error."""
    if not nodes:
        raise ConfigError(f"{where}: there are no nodes; a collector needs a receiver and an exporter")
    parsed = {name: _node(name, value, f"{where}: {name}") for name, value in nodes.items()}
    for node in parsed.values():
        _check_destinations(node, parsed, where)
    _check_no_cycle(parsed, where)
    return _runnable(parsed, where)


def _node(name: str, value: Setting, place: str) -> Node:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: a node's name has up to 64 letters, digits, '_' and '-'")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: expected a node (kind, plugin_urn, out_ports, config)")
    settings = build(
        _NodeSettings, {key: item for key, item in value.items() if item is not None}, where=place
    )
    plugin = parse_urn(settings.plugin_urn, f"{place}.plugin_urn")
    if plugin.kind is not settings.kind:
        raise ConfigError(
            f"{place}: kind is {settings.kind.value}, and {settings.plugin_urn!r} is a {plugin.kind.value}"
        )
    ports = list(settings.out_ports.values())
    return Node(
        name=name,
        plugin=plugin,
        destinations=tuple(dict.fromkeys(name for port in ports for name in port.destinations)),
        dispatch_strategy=ports[0].dispatch_strategy if ports else DispatchStrategy.ROUND_ROBIN,
        config=settings.config,
    )


def _check_destinations(node: Node, nodes: Mapping[str, Node], where: str) -> None:
    place = f"{where}: {node.name}.out_ports"
    if node.kind is Kind.EXPORTER:
        if node.destinations:
            raise ConfigError(f"{place}: an exporter has no ports")
        return
    if not node.destinations:
        raise ConfigError(f"{place}: a {node.kind.value} needs a port with at least one destination")
    for name in node.destinations:
        target = nodes.get(name)
        if target is None:
            raise _unknown_destination(place, name, nodes)
        if target.kind is Kind.RECEIVER:
            raise ConfigError(f"{place}: {name!r} is a receiver, which cannot be a destination")


def _unknown_destination(place: str, name: str, nodes: Iterable[str]) -> ConfigError:
    known = sorted(nodes)
    near = closest(name, known)
    hint = f"did you mean {near!r}?" if near else f"expected one of {', '.join(known)}"
    return ConfigError(f"{place}: no node is called {name!r}; {hint}")


def _check_no_cycle(nodes: Mapping[str, Node], where: str) -> None:
    done: set[str] = set()
    for name in nodes:
        _walk(name, nodes, (), done, where)


def _walk(name: str, nodes: Mapping[str, Node], path: tuple[str, ...], done: set[str], where: str) -> None:
    if name in path:
        cycle = " -> ".join((*path[path.index(name) :], name))
        raise ConfigError(f"{where}: data would flow in a cycle: {cycle}")
    if name in done:
        return
    for target in nodes[name].destinations:
        _walk(target, nodes, (*path, name), done, where)
    done.add(name)


def _runnable(parsed: Mapping[str, Node], where: str) -> Graph:
    """Return the graph without unimplemented nodes, which are also removed from all destinations."""
    left_out = tuple(node for node in parsed.values() if not node.is_built)
    unbuilt = {node.name for node in left_out}
    nodes = {name: _without(node, unbuilt) for name, node in parsed.items() if name not in unbuilt}
    for node in nodes.values():
        if node.kind is not Kind.EXPORTER and not node.destinations:
            raise ConfigError(
                f"{where}: {node.name}: all its destinations ({', '.join(parsed[node.name].destinations)}) "
                "are not implemented, so its data has no destination"
            )
        if node.kind is Kind.PROCESSOR:
            _check_processor(node, nodes, where)
    if not any(node.kind is Kind.RECEIVER for node in nodes.values()):
        raise ConfigError(f"{where}: no receiver can run")
    return Graph(nodes=nodes, left_out=left_out)


def _check_processor(node: Node, nodes: Mapping[str, Node], where: str) -> None:
    for name in node.destinations:
        if nodes[name].kind is Kind.PROCESSOR:
            raise ConfigError(
                f"{where}: {node.name}: {name!r} is a processor; a processor after a processor is not "
                "implemented"
            )


def _without(node: Node, unbuilt: set[str]) -> Node:
    return Node(
        name=node.name,
        plugin=node.plugin,
        destinations=tuple(name for name in node.destinations if name not in unbuilt),
        dispatch_strategy=node.dispatch_strategy,
        config=node.config,
    )
