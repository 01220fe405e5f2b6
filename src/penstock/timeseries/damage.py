"""Records that are damaged: each is told and counted once, by its hour and its name."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

from penstock.metrics import Registry
from penstock.timeseries.bucket import Bucket

__all__ = ["DamageLog", "add_warning", "place_of"]

_LOG = logging.getLogger(__name__)
_SHOWN_MAX: Final = 5
"""Records that one line of the log names; of the others it says how many they are."""
_LINES_MAX: Final = 20
"""Lines of the log for one hour; what comes later is counted only."""
_REMEMBERED_MAX: Final = 100_000
_WARNINGS_MAX: Final = 20
_MORE: Final = "more records are damaged; the log and the metrics of the server tell of them"


def place_of(bucket: Bucket | None) -> str:
    """Where a record stands, in a sentence; None is the whole database."""
    return "the database" if bucket is None else f"the hour {bucket.start_text}"


def add_warning(warnings: list[str], bucket: Bucket, record: str) -> None:
    """Say that an answer is without a record: each once, and not more than a person reads."""
    told = f"{place_of(bucket)} has damage, which is left out: {record}"
    if told not in warnings and len(warnings) <= _WARNINGS_MAX:
        warnings.append(told if len(warnings) < _WARNINGS_MAX else _MORE)


class DamageLog:
    """What was found damaged since the database was opened. May be told from any thread."""

    def __init__(self, registry: Registry) -> None:
        self._told: set[tuple[Bucket | None, str]] = set()
        self._lines: Counter[Bucket | None] = Counter()
        self._records = registry.counter(
            "timeseries.records_damaged", "Stored records that do not decode or are missing, left out."
        )

    def tell(self, bucket: Bucket | None, records: Sequence[str]) -> None:
        """Log and count those of the records, each a name and a reason, that were not told before."""
        new = [one for one in dict.fromkeys(records) if (bucket, one) not in self._told]
        if not new:
            return
        if len(self._told) > _REMEMBERED_MAX:
            self._told.clear()
            self._lines.clear()
        self._told.update((bucket, one) for one in new)
        self._records.inc(len(new))
        self._lines[bucket] += 1
        if self._lines[bucket] > _LINES_MAX:
            return
        more = f"; and {len(new) - _SHOWN_MAX} more" if len(new) > _SHOWN_MAX else ""
        _LOG.warning("%s has damage: %s%s", place_of(bucket), "; ".join(new[:_SHOWN_MAX]), more)
