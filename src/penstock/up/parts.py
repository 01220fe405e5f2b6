"""The plan of a part: its command, its probe, its files and ports."""

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
"""The environment variable with the fleet's data directory; a pipeline file may refer to it."""
TOPICS_URL: Final = "{topics}"
"""Placeholder in a part's arguments for the address of the topics server, once it is known."""
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
    """Return the stop stage of a kind; stage 0 is first. A part stops before the one that it delivers to."""
    return _STAGES[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A path that returns 200 when the part is ready. `key` is sent if it is set."""

    path: str
    key: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """The plan of one child process. A part without a probe reports its own readiness."""

    name: str
    kind: PartKind
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    port_file: str | None = None
    """The file to which the part writes its address."""
    address: str | None = None
    """The part's address, if it writes no port file."""
    ports: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """The host and port of each listener, by its setting."""
    probe: Probe | None = None
    needs_topics: bool = False
    """Whether the part uses the topics server and waits until it listens."""
    file: str | None = None
    """The user's file that the part runs."""
    grace_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The directories of a fleet. Paths are absolute."""

    base: str
    """The directory of the file; paths in the file are relative to it."""
    data_dir: str

    def path(self, text: str) -> str:
        """Return the absolute form of a path in the file."""
        return os.path.normpath(os.path.join(self.base, os.path.expanduser(text)))

    def inner(self, *names: str) -> str:
        return os.path.join(self.data_dir, *names)

    def store(self, text: str, default: str) -> str:
        """Return the address of a store: the one in the file, or a folder of the data directory."""
        if not text:
            return self.inner(default)
        return text if "://" in text else self.path(text)

    def run_file(self, name: str) -> str:
        """Return the path of a file that is used only while the fleet runs, or rewritten at every start."""
        return self.inner("run", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All parts in data-flow order, and the map of the fleet."""

    settings: UpSettings
    layout: Layout
    parts: tuple[PartPlan, ...]
    map: FleetMap
    collector_file: str | None = None
    """The collector's file. `penstock up` writes `collector_text` to it, if that is set."""
    collector_text: Mapping[str, Setting] | None = field(default=None, repr=False)
    faults: tuple[str, ...] = ()
    """Contradictions in the plan, which keep it from running."""

    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    """Keys in plain text, which must be masked in all output."""

    def part(self, name: str) -> PartPlan:
        return next(part for part in self.parts if part.name == name)


def pipeline_environment(data_dir: str) -> dict[str, str]:
    """Return the environment for a pipeline's file in a fleet with this data directory."""
    return {**os.environ, DATA_DIR_VARIABLE: data_dir}


def address_of(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(address: str) -> str:
    """Return `host:port` as reached from this machine, even for a server that listens on all addresses."""
    host, _, port = address.rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def missing_extra(kind: PartKind, installed: Callable[[str], bool] = is_installed) -> str | None:
    """Return why a part of this kind cannot run here and what to install, or None if it can run."""
    extra, packages = _NEEDS[kind]
    missing = [package for package in packages if not installed(package)]
    if not missing:
        return None
    return f"the package {missing[0].partition('.')[0]} is missing: pip install 'penstock[{extra}]'"
