"""The options of the databases' formats: their own, and those of the queue that they write to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.config import unknown_key
from penstock.errors import ConfigError
from penstock.spark.sink_options import QUEUE_OPTIONS, SinkOptions

__all__ = ["listed", "name_of", "split_options"]

_STORE_PREFIX = "store."
_SPARKS = "checkpointlocation"
_UNSHARDED = tuple(name for name in QUEUE_OPTIONS if name != "sharded")
"""A database is fed from one queue, in its order."""


def split_options(
    given: Mapping[str, str], own: Sequence[str], format_name: str
) -> tuple[dict[str, str], SinkOptions]:
    """The format's own options by their names, and the queue's.

    Raises `ConfigError` naming the option, and the nearest one if it is unknown.
    """
    folded = {name.replace("_", "").lower(): name for name in (*_UNSHARDED, *own)}
    mine: dict[str, str] = {}
    queue: dict[str, str] = {}
    for key, value in given.items():
        if key.startswith(_STORE_PREFIX) or key.lower() == _SPARKS:
            queue[key] = value
            continue
        name = folded.get(key.replace("_", "").lower())
        if name is None:
            raise unknown_key(f"{format_name}: option {key!r}", key, [*folded.values(), _STORE_PREFIX + "*"])
        (mine if name in own else queue)[name] = value
    return mine, SinkOptions.parse(queue)


def listed(text: str | None) -> tuple[str, ...] | None:
    """Names with commas between them; None if nothing was said."""
    if text is None:
        return None
    return tuple(name for part in text.split(",") if (name := part.strip()))


def name_of(option: str, text: str) -> str:
    """A column's name. Raises `ConfigError` if it is empty."""
    if not text.strip():
        raise ConfigError(f"{option}: expected the name of a column, found nothing")
    return text.strip()
