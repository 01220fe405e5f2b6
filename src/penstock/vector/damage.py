"""Damage found when a collection is opened."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import Corrupt
from penstock.metrics import Registry
from penstock.vector.keys import record_type

_LOG = logging.getLogger(__name__)

_LISTED_MAX: Final = 20
"""Maximum number of records or ids named in one log line."""


@dataclass(slots=True)
class Damage:
    """Records that do not decode or contradict others, and the affected vectors."""

    records: dict[bytes, str] = field(default_factory=dict)
    """The reason for each damaged record, by key."""
    lists: set[int] = field(default_factory=set)
    """Centroid ids of posting lists that cannot be read."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of dictionary entries that cannot be read."""
    unread: set[str] = field(default_factory=set)
    """External ids whose dictionary entry cannot be read or is ambiguous."""
    strays: dict[int, int] = field(default_factory=dict)
    """Slots of rows without an external id, by internal id."""
    doubles: list[int] = field(default_factory=list)
    """Rows that are also in an earlier list."""
    dead: set[int] = field(default_factory=set, compare=False)
    """Ids of deleted vectors that are still in a list, which is not damage."""
    rebuilt: list[str] = field(default_factory=list)
    """External ids of vectors that were rebuilt."""
    lost: list[str] = field(default_factory=list)
    """External ids of vectors without an undamaged copy, or the keys of their records."""
    unfiltered: list[str] = field(default_factory=list)
    """External ids that a filter may not find, because both their attributes and an index are damaged."""

    def note(self, key: bytes, why: str) -> None:
        self.records.setdefault(key, why)

    @contextlib.contextmanager
    def noting(self, key: bytes) -> Iterator[None]:
        """Record `Corrupt` as damage of the record `key` instead of raising it."""
        try:
            yield
        except Corrupt as error:
            self.note(key, str(error))

    def report(self, registry: Registry) -> None:
        """Log the damage and count it in the metrics."""
        reasons = (f"{record_type(key).name.lower()} {key.hex()}: {why}" for key, why in self.records.items())
        _LOG.warning("%d records are damaged: %s", len(self.records), _some(reasons))
        if self.rebuilt:
            _LOG.warning("%d vectors were rebuilt: %s", len(self.rebuilt), _some(self.rebuilt))
        if self.lost:
            _LOG.error("%d vectors are lost until they are written again: %s", *_counted(self.lost))
        if self.unfiltered:
            _LOG.error(
                "%d vectors may be missed by filters until written again: %s", *_counted(self.unfiltered)
            )
        records = registry.counter("vector.damaged_records", "Damaged records found when opening.", ["kind"])
        for key in self.records:
            records.inc(kind=record_type(key).name.lower())
        registry.counter("vector.vectors_rebuilt", "Vectors rebuilt when opening.").inc(len(self.rebuilt))
        registry.counter("vector.vectors_lost", "Vectors that could not be rebuilt when opening.").inc(
            len(self.lost)
        )


def _counted(ids: list[str]) -> tuple[int, str]:
    return len(ids), _some(ids)


def _some(texts: Iterable[str]) -> str:
    listed = list(texts)
    more = f" and {len(listed) - _LISTED_MAX} more" if len(listed) > _LISTED_MAX else ""
    return ", ".join(listed[:_LISTED_MAX]) + more
