"""Resource and scope of every row: told once in a message, repeated in the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import LimitExceeded
from penstock.otlp.schema import STR

__all__ = ["REPEATED_BYTES_MAX", "Context", "Places", "lift"]

REPEATED_BYTES_MAX: Final = 256 << 20
"""A small request can repeat a large resource a million times; more than this no bundle may hold anyway."""

_ENTRY_BYTES: Final = 48
"""What an attribute takes besides its text: offsets, kind, numbers."""

Places = npt.NDArray[np.int64]
"""Which resource or scope a row belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The resources and scopes of one request, as columns, and which resource each scope belongs to."""

    resources: dict[str, pa.Array]
    scopes: dict[str, pa.Array]
    resource_of_scope: Places

    def columns(self, scope_of_row: Places) -> dict[str, pa.Array]:
        """The columns of both for every row. Raises `LimitExceeded` when they would repeat too much."""
        resource_of_row = self.resource_of_scope[scope_of_row]
        self._check_size(resource_of_row, scope_of_row)
        by_resource, by_scope = pa.array(resource_of_row), pa.array(scope_of_row)
        names = lift(self.resources["resource_attributes"], "service.name").dictionary_encode()
        found = {"service_name": names.take(by_resource)}
        found |= {name: column.take(by_resource) for name, column in self.resources.items()}
        return found | {name: column.take(by_scope) for name, column in self.scopes.items()}

    def _check_size(self, resource_of_row: Places, scope_of_row: Places) -> None:
        repeated = _row_bytes(self.resources["resource_attributes"])[resource_of_row].sum()
        repeated += _row_bytes(self.scopes["scope_attributes"])[scope_of_row].sum()
        if repeated > REPEATED_BYTES_MAX:
            raise LimitExceeded(
                f"the attributes of resources and scopes would take {repeated} bytes, repeated in "
                f"{len(scope_of_row)} rows; at most {REPEATED_BYTES_MAX} fit: send fewer items in a request"
            )


def _row_bytes(attributes: pa.MapArray) -> Places:
    """About how many bytes each row's attributes take."""
    offsets = np.asarray(attributes.offsets, np.int64)
    start, end = int(offsets[0]), int(offsets[-1])
    per_entry = np.full(end - start, _ENTRY_BYTES, np.int64)
    values = attributes.items.slice(start, end - start)
    texts = [
        attributes.keys.slice(start, end - start),
        *(values.field(name) for name in ("str", "bytes", "ser")),
    ]
    for text in texts:
        per_entry += np.asarray(pc.fill_null(pc.binary_length(text), 0), np.int64)
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(per_entry)])
    found: Places = running[offsets[1:] - start] - running[offsets[:-1] - start]
    return found


def lift(attributes: pa.MapArray, key: str) -> pa.StringArray:
    """The text of the first attribute `key` of every row; null where there is none or it is no text."""
    offsets = np.asarray(attributes.offsets, np.int64)
    start, end = int(offsets[0]), int(offsets[-1])
    values = attributes.items.slice(start, end - start)
    texts = values.field("str")
    wanted = np.asarray(
        pc.and_(
            pc.equal(attributes.keys.slice(start, end - start), key),
            pc.fill_null(pc.equal(values.field("type"), STR), False),
        )
    )
    hits = np.flatnonzero(wanted)
    first = np.searchsorted(hits, offsets[:-1] - start)
    inside = np.searchsorted(hits, offsets[1:] - start) > first
    places = np.zeros(len(attributes), np.int64)
    places[inside] = hits[first[inside]]
    return texts.take(pa.array(places, mask=~inside))
