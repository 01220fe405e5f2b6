"""Which parts this installation can run, and the line of pip for those that it cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Final

from penstock.up import PartKind

__all__ = ["is_installed", "missing_extra"]

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
