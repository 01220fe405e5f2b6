"""Parsers for the options of sources and sinks.

Spark ignores the case of option names. An `_` in a name is optional.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from penstock.config import unknown_key
from penstock.errors import ConfigError
from penstock.units import parse_size

STORE_PREFIX: Final = "store."
"""The prefix of options for a store's backend."""
SPARK_OPTIONS: Final = frozenset({"checkpointlocation"})
"""Options of Spark itself that it also passes to a sink."""
PARTITIONS_MAX: Final = 10_000

_FLAGS: Final = {"true": True, "false": False}
C = TypeVar("C", bound=str)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def named_options(
    given: Mapping[str, str], names: Sequence[str], format_name: str, *, with_store: bool = False
) -> dict[str, str]:
    """Return the options by their canonical names, without those of Spark.

    With `with_store`, accept and omit the options of the store's backend. Raise `ConfigError` for an unknown
    name, and suggest the closest one.
    """
    folded = {name.replace("_", "").lower(): name for name in names}
    known = [*names, STORE_PREFIX + "*"] if with_store else names
    plain: dict[str, str] = {}
    for key, value in given.items():
        if key.lower() in SPARK_OPTIONS or (with_store and key.startswith(STORE_PREFIX)):
            continue
        name = folded.get(key.replace("_", "").lower())
        if name is None:
            raise unknown_key(f"{format_name}: option {key!r}", key, known)
        plain[name] = value
    return plain


def backend_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the store's backend, without their prefix."""
    return {key[len(STORE_PREFIX) :]: value for key, value in given.items() if key.startswith(STORE_PREFIX)}


def count_option(plain: Mapping[str, str], name: str) -> int | None:
    """Return a whole number of at least 1, or None if absent. Raise `ConfigError` if it is invalid."""
    if name not in plain:
        return None
    try:
        count = int(plain[name])
    except ValueError:
        count = 0
    if count < 1 or (name == "partitions" and count > PARTITIONS_MAX):
        raise ConfigError(f"{name}: expected a whole number of at least 1, found {plain[name]!r}")
    return count


def size_option(plain: Mapping[str, str], name: str, most: int | None = None) -> int | None:
    """Return a size in bytes from 1 to `most`, or None if absent. Raise `ConfigError` if it is invalid."""
    if name not in plain:
        return None
    size = parse_size(plain[name])
    if size < 1 or (most is not None and size > most):
        bound = "at least 1 byte" if most is None else f"1 to {most} bytes"
        raise ConfigError(f"{name}: expected {bound}, found {plain[name]!r}")
    return size


def flag_option(plain: Mapping[str, str], name: str) -> bool | None:
    """Return a boolean, or None if absent. Raise `ConfigError` if it is invalid."""
    if name not in plain:
        return None
    flag = _FLAGS.get(plain[name].strip().lower())
    if flag is None:
        raise ConfigError(f"{name}: expected true or false, found {plain[name]!r}")
    return flag


def choice_option(plain: Mapping[str, str], name: str, choices: Sequence[C], default: C) -> C:
    """Return one of `choices`, or `default` if absent. Raise `ConfigError` for another value."""
    folded = plain.get(name, default).strip().lower()
    for choice in choices:
        if folded == choice:
            return choice
    words = " or ".join(choices) if len(choices) == 2 else ", ".join(choices)
    raise ConfigError(f"{name}: expected {words}, found {plain[name]!r}")
