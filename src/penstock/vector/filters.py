"""Filters on the indexed attributes of the vectors that a search may find.

    And(Eq("lang", "en"), Neq("year", 1999), In("tag", ["a", "b"]))

`Neq` also matches vectors without the field. An empty `Or` matches nothing, an empty `And` everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInput
from penstock.vector.codec import index_value, normal
from penstock.vector.model import Collection, FieldType, Scalar, fits, utf8_length
from penstock.vector.rows import Codes

Mask: TypeAlias = npt.NDArray[np.bool_]
_DEPTH_MAX: Final = 32
_TERMS_MAX: Final = 10_000
"""Maximum number of comparisons in one filter."""
_UNKNOWN: Final = -2
"""Code of a value that no row has."""


@dataclass(frozen=True, slots=True)
class Eq:
    """Match if the field has this value."""

    field: str
    value: Scalar


@dataclass(frozen=True, slots=True)
class Neq:
    """Match if the field has another value or none."""

    field: str
    value: Scalar


@dataclass(frozen=True, slots=True, init=False)
class In:
    """Match if the field has one of these values."""

    field: str
    values: tuple[Scalar, ...]

    def __init__(self, field: str, values: Sequence[Scalar]) -> None:
        object.__setattr__(self, "field", field)
        object.__setattr__(self, "values", tuple(values))


@dataclass(frozen=True, slots=True, init=False)
class And:
    """Match if all of these filters match."""

    filters: tuple[Filter, ...]

    def __init__(self, *filters: Filter) -> None:
        object.__setattr__(self, "filters", filters)


@dataclass(frozen=True, slots=True, init=False)
class Or:
    """Match if any of these filters matches."""

    filters: tuple[Filter, ...]

    def __init__(self, *filters: Filter) -> None:
        object.__setattr__(self, "filters", filters)


Filter: TypeAlias = Eq | Neq | In | And | Or


def check_filter(collection: Collection, wanted: Filter) -> None:
    """Check a filter against the collection.

    Raises `InvalidInput` for a field that is not indexed or has another type, and for a filter that is too
    large.
    """
    pending, terms = [(wanted, 1)], 0
    while pending:
        one, depth = pending.pop()
        if depth > _DEPTH_MAX:
            raise InvalidInput(f"a filter may be at most {_DEPTH_MAX} levels deep")
        if isinstance(one, And | Or):
            pending += [(each, depth + 1) for each in one.filters]
            terms += 1
        else:
            values = one.values if isinstance(one, In) else (one.value,)
            _check_values(collection, one.field, values)
            terms += max(1, len(values))
        if terms > _TERMS_MAX:
            raise InvalidInput(f"a filter may have at most {_TERMS_MAX:,} comparisons")


@dataclass(frozen=True, slots=True)
class IndexedColumn:
    """A search's view of one indexed field: the code of each row's value, and the code of each value."""

    codes: Codes
    code_of: Mapping[bytes, int]
    type: FieldType

    def code(self, value: Scalar) -> int:
        return self.code_of.get(index_value(normal(value, self.type)), _UNKNOWN)


def mask(wanted: Filter, columns: Mapping[str, IndexedColumn], count: int) -> Mask:
    """Return the mask of matching rows among the first `count` rows."""
    if isinstance(wanted, And | Or):
        combine = np.logical_and if isinstance(wanted, And) else np.logical_or
        made = np.full(count, isinstance(wanted, And))
        for each in wanted.filters:
            combine(made, mask(each, columns, count), out=made)
        return made
    column = columns[wanted.field]
    codes = column.codes[:count]
    if isinstance(wanted, In):
        return np.isin(codes, [column.code(value) for value in wanted.values])
    same: Mask = codes == column.code(wanted.value)
    return ~same if isinstance(wanted, Neq) else same


def parse_filter(value: object) -> Filter:
    """Parse the filter of a request, such as `{"eq": {"field": "lang", "value": "en"}}`.

    Raises `InvalidInput`.
    """
    return _parsed(value, 1)


def _parsed(value: object, depth: int) -> Filter:
    if depth > _DEPTH_MAX:
        raise InvalidInput(f"a filter may be at most {_DEPTH_MAX} levels deep")
    if not isinstance(value, Mapping) or len(value) != 1:
        raise InvalidInput("a filter must be an object with one of eq, neq, in, and, or")
    ((kind, operand),) = value.items()
    if kind in ("and", "or"):
        parts = operand.get("filters") if isinstance(operand, Mapping) else operand
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise InvalidInput(f"{kind} takes a list of filters")
        filters = [_parsed(each, depth + 1) for each in parts]
        return And(*filters) if kind == "and" else Or(*filters)
    if kind not in ("eq", "neq", "in"):
        raise InvalidInput(f"a filter must be one of eq, neq, in, and, or, not {str(kind)[:80]!r}")
    wanted = "values" if kind == "in" else "value"
    if not isinstance(operand, Mapping) or operand.keys() != {"field", wanted}:
        raise InvalidInput(f"{kind} takes an object with field and {wanted}")
    if not isinstance(operand["field"], str):
        raise InvalidInput(f"{kind}: field must be a name")
    return _comparison(kind, operand["field"], operand[wanted])


def _comparison(kind: str, name: str, operand: object) -> Filter:
    values = operand if kind == "in" else [operand]
    if not isinstance(values, list) or not all(isinstance(each, str | int | float) for each in values):
        raise InvalidInput(f"{kind}: {name!r} can be compared only with texts, numbers and flags")
    if kind == "in":
        return In(name, values)
    return Eq(name, values[0]) if kind == "eq" else Neq(name, values[0])


def _check_values(collection: Collection, name: str, values: Sequence[Scalar]) -> None:
    one = collection.indexed.get(name)
    if one is None:
        known = ", ".join(sorted(collection.indexed)) or "none"
        raise InvalidInput(f"{name[:80]!r} is not an indexed field; the indexed fields are: {known}")
    for value in values:
        if not fits(value, one.type):
            raise InvalidInput(f"{name!r} is {one.type.value}, it cannot be compared with {value!r:.80}")
        if isinstance(value, str):
            utf8_length(value)
