"""Which plugin a node is. Both orders are in use: `urn:otel:otlp:receiver`, `urn:otap:receiver:otlp`."""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass
from typing import Final

from penstock.errors import ConfigError

__all__ = ["PLUGINS", "Kind", "Plugin", "parse_urn"]


class Kind(enum.StrEnum):
    """What a node does with data."""

    RECEIVER = "receiver"
    PROCESSOR = "processor"
    EXPORTER = "exporter"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One thing a node can be."""

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
    """The plugin of a urn: a namespace of any name, then kind and name in either order.

    Raises `ConfigError` for anything else; an unknown plugin names the nearest one.
    """
    parts = text.split(":")
    if len(parts) != 4 or parts[0] != "urn" or not all(parts):
        raise ConfigError(
            f"{place}: {text!r} is no plugin urn: write urn:otel:NAME:KIND or urn:otel:KIND:NAME, where KIND "
            f"is {', '.join(sorted(_KINDS))}"
        )
    first, second = parts[2], parts[3]
    if second in _KINDS and not (first in _KINDS and second not in _KINDS):
        plugin = Plugin(Kind(second), first)
    elif first in _KINDS:
        plugin = Plugin(Kind(first), second)
    else:
        raise ConfigError(f"{place}: {text!r} names no kind: one of {', '.join(sorted(_KINDS))} is missing")
    if plugin not in PLUGINS:
        raise _unknown(plugin, place)
    return plugin


def _unknown(plugin: Plugin, place: str) -> ConfigError:
    names = sorted(known.name for known in PLUGINS if known.kind is plugin.kind)
    nearest = difflib.get_close_matches(plugin.name, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(names)}"
    return ConfigError(f"{place}: no {plugin.kind.value} is called {plugin.name!r}; {hint}")
