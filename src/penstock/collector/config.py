"""The configuration file of a collector: the graph, the settings of every node, and warnings.

`{{name}}` in a value is replaced by a variable of `--set` or the environment before the file is decoded.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.collector.graph import Graph, Kind, Node, parse_graph
from penstock.collector.settings import (
    Address,
    BufferSettings,
    DebugSettings,
    FileSettings,
    FlakySettings,
    NoopSettings,
    OtapExporterSettings,
    OtapReceiverSettings,
    OtlpExporterSettings,
    OtlpReceiverSettings,
    ParquetSettings,
    parse_address,
)
from penstock.config import Setting, build, closest, load_mapping
from penstock.errors import ConfigError
from penstock.http import allowed_hosts
from penstock.units import DurationLike, convert_units, seconds_of

if TYPE_CHECKING:
    from penstock.quiver import QuiverConfig

_VARIABLE: Final = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")


def fill(settings: Mapping[str, Setting], variables: Mapping[str, str], *, where: str) -> dict[str, Setting]:
    """Replace every `{{name}}` in the values of `settings`. Keys stay unchanged.

    Raise `ConfigError` with the location and the name of an undefined variable. Replaced text is not searched
    again, so a variable cannot refer to another one.
    """
    return {key: _filled(value, variables, f"{where}: {key}") for key, value in settings.items()}


def _filled(value: Setting, variables: Mapping[str, str], place: str) -> Setting:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: _value(found[1], variables, place), value)
    if isinstance(value, Mapping):
        return {key: _filled(item, variables, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, variables, f"{place}.{index}") for index, item in enumerate(value)]
    return value


def _value(name: str, variables: Mapping[str, str], place: str) -> str:
    found = variables.get(name)
    if found is None:
        near = closest(name, variables)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"{place}: the variable {name!r} is not set: use --set {name}=…, or set it in the "
            f"environment{hint}"
        )
    return found


class Validation(enum.StrEnum):
    """How thoroughly a raw request is checked before it is stored."""

    FRAMING = "framing"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistenceSettings:
    """The settings of a persistence node: those of Quiver, and how requests are checked."""

    quiver: QuiverConfig
    validation: Validation = Validation.FRAMING

    @property
    def is_raw(self) -> bool:
        """Whether requests are stored unchanged instead of as columns."""
        return self.quiver.otlp_handling == "pass_through"

    @property
    def is_shared(self) -> bool:
        """Whether the destinations share one stream instead of each receiving all data."""
        return self.quiver.subscription == "shared"


NodeSettings: TypeAlias = (
    OtlpReceiverSettings
    | OtapReceiverSettings
    | PersistenceSettings
    | OtlpExporterSettings
    | OtapExporterSettings
    | BufferSettings
    | FileSettings
    | ParquetSettings
    | DebugSettings
    | NoopSettings
    | FlakySettings
)

_SETTINGS: Final[Mapping[tuple[Kind, str], type]] = {
    (Kind.RECEIVER, "otlp"): OtlpReceiverSettings,
    (Kind.RECEIVER, "otap"): OtapReceiverSettings,
    (Kind.EXPORTER, "otlp"): OtlpExporterSettings,
    (Kind.EXPORTER, "otap"): OtapExporterSettings,
    (Kind.EXPORTER, "buffer"): BufferSettings,
    (Kind.EXPORTER, "file"): FileSettings,
    (Kind.EXPORTER, "parquet"): ParquetSettings,
    (Kind.EXPORTER, "debug"): DebugSettings,
    (Kind.EXPORTER, "noop"): NoopSettings,
    (Kind.EXPORTER, "flaky"): FlakySettings,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """How the collector reports its own state, over HTTP and as OTLP."""

    metrics_addr: str | None = None
    """The `host:port` of `/metrics`, `/health` and `/ready`."""
    otlp: OtlpExporterSettings | None = None
    """The destination for the metrics as OTLP."""
    interval: DurationLike = "60s"
    allowed_hosts: tuple[str, ...] = ()
    """The accepted names in `Host`, besides addresses, localhost and this machine's name. `*` accepts any."""

    interval_s = seconds_of("interval")

    def __post_init__(self) -> None:
        convert_units(self)
        _ = self.address, allowed_hosts(self.allowed_hosts, "allowed_hosts")
        if self.interval_s <= 0:
            raise ConfigError("interval must be above 0")

    @property
    def address(self) -> Address | None:
        return None if self.metrics_addr is None else parse_address(self.metrics_addr)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    nodes: dict[str, object]
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    dead_letters: str = "./dead_letters"
    drain_timeout: DurationLike = "30s"
    cores: int = 1

    drain_timeout_s = seconds_of("drain_timeout")

    def __post_init__(self) -> None:
        convert_units(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The validated configuration of a collector."""

    graph: Graph
    settings: Mapping[str, NodeSettings]
    telemetry: TelemetrySettings
    dead_letters: str
    drain_timeout_s: float
    cores: int

    def warnings(self) -> list[str]:
        """Return a warning for each valid setting that is probably a mistake."""
        return [*self.graph.warnings(), *self._loops()]

    def persistence(self, node: Node) -> PersistenceSettings:
        settings = self.settings[node.name]
        assert isinstance(settings, PersistenceSettings)
        return settings

    def _loops(self) -> list[str]:
        listeners = [
            (name, address) for name, settings in self.settings.items() for address in _listening(settings)
        ]
        warnings = []
        for name, settings in self.settings.items():
            if not isinstance(settings, OtlpExporterSettings | OtapExporterSettings):
                continue
            endpoint = settings.endpoint
            warnings += [
                f"{name}: sends to {endpoint}, where {receiver} of the same file listens: data may loop "
                "indefinitely"
                for receiver, address in listeners
                if address.is_reached_by(endpoint)
            ]
        return warnings


def load_plan(path: str | Path, variables: Mapping[str, str]) -> Plan:
    """Read the plan in a YAML file. Raise `ConfigError` with the location of the first error."""
    return parse_plan(load_mapping(path), variables, where=str(path))


def parse_plan(loaded: Mapping[str, Setting], variables: Mapping[str, str], *, where: str) -> Plan:
    """Read the plan in a mapping, without access to files, ports or stores."""
    file = build(_File, fill(loaded, variables, where=where), where=where)
    graph = parse_graph(file.nodes, where=f"{where}: nodes")
    if file.cores < 1:
        raise ConfigError(f"{where}: cores must be at least 1, not {file.cores}")
    nodes = [*graph.nodes.values(), *graph.left_out]
    settings = {node.name: _node_settings(node, f"{where}: nodes.{node.name}.config") for node in nodes}
    plan = Plan(
        graph=graph,
        settings=settings,
        telemetry=file.telemetry,
        dead_letters=file.dead_letters,
        drain_timeout_s=file.drain_timeout_s,
        cores=file.cores,
    )
    _check_apart(plan, where)
    return plan


def _node_settings(node: Node, place: str) -> NodeSettings:
    if node.plugin.name == "persistence":
        return _persistence(node.config, place)
    built: NodeSettings = build(_SETTINGS[(node.kind, node.plugin.name)], node.config, where=place)
    return built


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnKeys:
    validation: Validation = Validation.FRAMING


def _persistence(config: Mapping[str, Setting], place: str) -> PersistenceSettings:
    from penstock.quiver import QuiverConfig

    own = {key: value for key, value in config.items() if key == "validation"}
    rest = {key: value for key, value in config.items() if key not in own}
    return PersistenceSettings(
        quiver=QuiverConfig.from_mapping(rest, where=place),
        validation=build(_OwnKeys, own, where=place).validation,
    )


def _check_apart(plan: Plan, where: str) -> None:
    """Raise `ConfigError` if two nodes write to the same directory or listen on the same port."""
    seen: dict[str, str] = {}
    for name, settings in plan.settings.items():
        claims = [str(address) for address in _listening(settings) if address.port]
        if isinstance(settings, PersistenceSettings):
            claims.append(str(Path(settings.quiver.path).absolute()))
        if name not in plan.graph.nodes:
            continue
        for claim in claims:
            if claim in seen:
                raise ConfigError(f"{where}: nodes: {seen[claim]} and {name} both use {claim}")
            seen[claim] = name


def _listening(settings: NodeSettings) -> list[Address]:
    if isinstance(settings, OtlpReceiverSettings):
        return settings.addresses
    return [settings.address] if isinstance(settings, OtapReceiverSettings) else []
