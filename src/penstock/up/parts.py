"""What a part of a fleet is before it runs: its command, its probe, its place on this machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.config import Secret, Setting
from penstock.up.settings import UpSettings
from penstock.up.status import FleetMap, PartKind

DATA_DIR_VARIABLE: Final = "PENSTOCK_DATA_DIR"
"""In the environment of a pipeline: the fleet's data directory, which the pipeline's file may name."""
TOPICS_URL: Final = "{topics}"
"""In a part's arguments: where the topics server listens, which is known when it does."""
_STAGES: Final = {
    PartKind.COLLECTOR: 0,
    PartKind.TOPICS: 0,
    PartKind.RELAY: 1,
    PartKind.PIPELINE: 2,
    PartKind.TIMESERIES: 3,
    PartKind.VECTOR: 3,
    PartKind.CONSOLE: 4,
}
_ANY: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}  # noqa: S104 - these are replaced
_SERVER: Final = ("h2", "httptools")
_NEEDS: Final = {
    PartKind.COLLECTOR: ("collector", (*_SERVER, "grpc", "google.protobuf", "opentelemetry.proto", "ptars")),
    PartKind.TOPICS: ("topics", (*_SERVER, "httpx")),
    PartKind.RELAY: ("topics", ("httpx",)),
    PartKind.PIPELINE: ("spark", ("pyspark", "pandas")),
    PartKind.TIMESERIES: (
        "databases,timeseries,topics",
        (*_SERVER, "slatedb", "promql_parser", "pyroaring", "cramjam", "opentelemetry.proto"),
    ),
    PartKind.VECTOR: ("databases,vector,topics", (*_SERVER, "slatedb", "pyroaring")),
    PartKind.CONSOLE: ("topics", (*_SERVER, "httpx")),
}


def stage_of(kind: PartKind) -> int:
    """When a part stops: those of stage 0 first, so that each finds what it empties into still there."""
    return _STAGES[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A path that answers 200 when the part does its work. `key` is sent along if there is one."""

    path: str
    key: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """One child process. Without a probe it is ready when it says so itself."""

    name: str
    kind: PartKind
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    port_file: str | None = None
    """Where it writes the address it listens on."""
    address: str | None = None
    """Where it listens, if it writes no file."""
    ports: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Host and port of each address it needs, by the key that sets it."""
    probe: Probe | None = None
    needs_topics: bool = False
    """Its arguments name the topics server, so it waits until that listens."""
    file: str | None = None
    """A file of the user's that it runs."""
    grace_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things are on this machine. Paths are absolute."""

    base: str
    """The directory of the file, which its paths are relative to."""
    data_dir: str

    def path(self, text: str) -> str:
        """A path of the file."""
        return os.path.normpath(os.path.join(self.base, os.path.expanduser(text)))

    def inner(self, *names: str) -> str:
        return os.path.join(self.data_dir, *names)

    def store(self, text: str, default: str) -> str:
        """The address of a store: one of the file, or a folder of the data directory."""
        if not text:
            return self.inner(default)
        return text if "://" in text else self.path(text)

    def run_file(self, name: str) -> str:
        """Return the path of a file that is only used while the fleet runs, or rewritten at every start."""
        return self.inner("run", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every part, in the order of the flow, and where everything is."""

    settings: UpSettings
    layout: Layout
    parts: tuple[PartPlan, ...]
    map: FleetMap
    collector_file: str | None = None
    """The collector's file; `collector_text` is to be written there, if there is one."""
    collector_text: Mapping[str, Setting] | None = field(default=None, repr=False)
    faults: tuple[str, ...] = ()
    """What does not fit together: a plan that has any is not run."""

    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    """What lets somebody in, in plain text: nothing of it may be told."""

    def part(self, name: str) -> PartPlan:
        return next(part for part in self.parts if part.name == name)


def pipeline_environment(data_dir: str) -> dict[str, str]:
    """Return the environment that the file of a pipeline sees in a fleet with this data directory."""
    return {**os.environ, DATA_DIR_VARIABLE: data_dir}


def address_of(host: str, port: int) -> str:
    """`host:port`, with an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(address: str) -> str:
    """`host:port` as this machine reaches it: a server that listens everywhere is here, too."""
    host, _, port = address.rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"


def is_installed(package: str) -> bool:
    """Whether a package is there, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def missing_extra(kind: PartKind, installed: Callable[[str], bool] = is_installed) -> str | None:
    """Why a part of this kind cannot run here, with what would change that; None if it can."""
    extra, packages = _NEEDS[kind]
    missing = [package for package in packages if not installed(package)]
    if not missing:
        return None
    return f"the package {missing[0].partition('.')[0]} is missing: pip install 'penstock[{extra}]'"
