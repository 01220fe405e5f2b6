"""Damage found when a collection is opened, and the repair of it."""

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

_TOLD_MAX: Final = 20
"""Records and ids that one line of the log names."""


@dataclass(slots=True)
class Damage:
    """Records that do not decode or contradict others, and the vectors that it concerns."""

    records: dict[bytes, str] = field(default_factory=dict)
    """By key, what is wrong."""
    lists: set[int] = field(default_factory=set)
    """Posting lists that cannot be read, by their centroids."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of dictionary entries that cannot be read."""
    unread: set[str] = field(default_factory=set)
    """External ids whose dictionary entry does not tell what they stand for."""
    strays: dict[int, int] = field(default_factory=dict)
    """Rows without an external id, by id."""
    doubles: list[int] = field(default_factory=list)
    """Rows that are in an earlier list as well."""
    dead: set[int] = field(default_factory=set, compare=False)
    """Ids of deleted vectors that are in a list, which is no damage."""
    rebuilt: list[str] = field(default_factory=list)
    """External ids that are found again."""
    lost: list[str] = field(default_factory=list)
    """External ids whose vectors are damaged everywhere, or the keys of their records."""
    unfiltered: list[str] = field(default_factory=list)
    """External ids that a filter may not find, because both their attributes and an index are damaged."""

    def note(self, key: bytes, why: str) -> None:
        self.records.setdefault(key, why)

    @contextlib.contextmanager
    def noting(self, key: bytes) -> Iterator[None]:
        """Record damage of a record instead of raising `Corrupt`."""
        try:
            yield
        except Corrupt as error:
            self.note(key, str(error))

    def tell(self, registry: Registry) -> None:
        """Log it and count it."""
        told = (f"{record_type(key).name.lower()} {key.hex()}: {why}" for key, why in self.records.items())
        _LOG.warning("%d records are damaged: %s", len(self.records), _some(told))
        if self.rebuilt:
            _LOG.warning("%d vectors were rebuilt: %s", len(self.rebuilt), _some(self.rebuilt))
        if self.lost:
            _LOG.error("%d vectors are lost until they are written again: %s", *_counted(self.lost))
        if self.unfiltered:
            _LOG.error(
                "%d vectors may be missed by filters until written again: %s", *_counted(self.unfiltered)
            )
        records = registry.counter("vector.damaged_records", "Damaged records that opens found.", ["kind"])
        for key in self.records:
            records.inc(kind=record_type(key).name.lower())
        registry.counter("vector.vectors_rebuilt", "Vectors that opens found again.").inc(len(self.rebuilt))
        registry.counter("vector.vectors_lost", "Vectors that opens could not find again.").inc(
            len(self.lost)
        )


def _counted(ids: list[str]) -> tuple[int, str]:
    return len(ids), _some(ids)


def _some(texts: Iterable[str]) -> str:
    listed = list(texts)
    more = f" and {len(listed) - _TOLD_MAX} more" if len(listed) > _TOLD_MAX else ""
    return ", ".join(listed[:_TOLD_MAX]) + more
