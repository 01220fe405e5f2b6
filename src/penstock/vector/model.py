"""The data model: vectors with caller-chosen ids and attributes, in a collection with one schema."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.coordinator import KEY_BYTES_MAX
from penstock.errors import ConfigError, InvalidInput
from penstock.vector.keys import metadata_key

Scalar: TypeAlias = str | int | float | bool
Floats: TypeAlias = npt.NDArray[np.float32]
Components: TypeAlias = Sequence[float] | npt.NDArray[np.floating]

VECTOR_FIELD: Final = "vector"
"""Name of the embedding where formats and requests list it among the attributes."""
ID_BYTES_MAX: Final = 64
COMPONENT_MAX: Final = 1e15
"""Limit of a component. The sum of 65,535 such squares still fits a 32-bit float, so no distance
overflows."""
_DIMENSIONS_MAX: Final = 65_535
_TEXT_BYTES_MAX: Final = 65_535
_ATTRIBUTES_MAX: Final = 65_534
_INT64: Final = 2**63
_NUMBER_BYTES: Final = 9
"""Size of a number in the index, including its tag."""


class Metric(IntEnum):
    """The measure of similarity. The number is its value in storage."""

    L2 = 0
    """Squared Euclidean distance. Lower is better."""
    COSINE = 1
    """Squared Euclidean distance of the normalised vectors, which is 2 * (1 - cosine). Lower is better."""
    DOT = 2
    """Dot product. Higher is better."""

    @classmethod
    def named(cls, name: str | Metric) -> Metric:
        """Return the metric with this name. Raises `ConfigError` if the name is unknown."""
        if isinstance(name, Metric):
            return name
        try:
            return cls[name.upper()]
        except (KeyError, AttributeError):
            raise ConfigError(f"metric must be one of 'l2', 'cosine', 'dot', not {name!r}") from None


class FieldType(StrEnum):
    """The type of an attribute. A text is a string that is not compared as a whole."""

    STRING = "string"
    INT64 = "int64"
    FLOAT64 = "float64"
    BOOL = "bool"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One attribute of the schema. Filters may use it if it is indexed."""

    name: str
    type: FieldType
    indexed: bool = False

    def __post_init__(self) -> None:
        if not self.name or self.name == VECTOR_FIELD or len(self.name.encode()) > _TEXT_BYTES_MAX:
            raise ConfigError(f"a field cannot have the name {self.name[:80]!r}")
        try:
            object.__setattr__(self, "type", FieldType(self.type))
        except ValueError:
            choices = ", ".join(repr(choice.value) for choice in FieldType)
            raise ConfigError(f"{self.name}: type is one of {choices}, not {self.type!r}") from None
        if self.indexed and self.type is FieldType.TEXT:
            raise ConfigError(f"{self.name}: a text cannot be indexed; make it a string to filter by it")
        if self.indexed and len(metadata_key(self.name, b"")) + _NUMBER_BYTES > KEY_BYTES_MAX:
            raise ConfigError(f"{self.name[:80]}…: the name is too long for an indexed field")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """The properties of all vectors of a database. They are fixed when the database is created."""

    dimensions: int
    metric: Metric = Metric.L2
    fields: tuple[Field, ...] = ()
    """The schema. Without one, any attribute is allowed and none is indexed."""

    def __post_init__(self) -> None:
        if isinstance(self.dimensions, bool) or not isinstance(self.dimensions, int):
            raise ConfigError(f"dimensions is a whole number, not {self.dimensions!r}")
        if not 1 <= self.dimensions <= _DIMENSIONS_MAX:
            raise ConfigError(f"dimensions is 1 to {_DIMENSIONS_MAX:,}, not {self.dimensions}")
        names = [one.name for one in self.fields]
        if len(set(names)) < len(names):
            raise ConfigError("two fields have the same name")

    @property
    def indexed(self) -> dict[str, Field]:
        """The fields that filters may use."""
        return {one.name: one for one in self.fields if one.indexed}

    def check(self, vector: Vector) -> None:
        """Check that the collection can hold the vector. Raises `InvalidInput`."""
        check_id(vector.id)
        self.check_components(vector.vector, vector.id)
        if len(vector.attributes) > _ATTRIBUTES_MAX:
            raise InvalidInput(f"{vector.id!r} has more than {_ATTRIBUTES_MAX:,} attributes")
        schema = {one.name: one for one in self.fields} if self.fields else None
        for name, value in vector.attributes.items():
            if schema is not None and name not in schema:
                raise InvalidInput(f"{vector.id!r}: the schema has no field {name[:80]!r}")
            check_attribute(vector.id, name, value, None if schema is None else schema[name].type)
            if schema is not None and schema[name].indexed and isinstance(value, str):
                _check_key(vector.id, name, value)

    def check_names(self, names: Iterable[object]) -> None:
        """Check names of attributes. Raises `InvalidInput` for one that no vector can have."""
        known = {VECTOR_FIELD, *(one.name for one in self.fields)} if self.fields else None
        for name in names:
            if not isinstance(name, str):
                raise InvalidInput(f"include_fields must be a list of names, but {name!r:.80} is not a name")
            if known is not None and name not in known:
                raise InvalidInput(f"include_fields: the schema has no field {name[:80]!r}")

    def check_components(self, components: Floats, whose: str) -> None:
        """Check that the components are finite numbers, one for each dimension. Raises `InvalidInput`."""
        if components.shape != (self.dimensions,):
            shape = "x".join(map(str, components.shape))
            raise InvalidInput(f"{whose!r} has {shape} components, the collection has {self.dimensions}")
        wrong = ~(np.abs(components) <= COMPONENT_MAX)  # also true for NaN
        if wrong.any():
            place = int(wrong.argmax())
            raise InvalidInput(
                f"{whose!r}: component {place} is {components[place]}; "
                "each must be a number from -1e15 to 1e15"
            )

    def differences(self, claim: Claim) -> list[str]:
        """Describe the contradictions between the claim and the collection."""
        found = []
        if claim.dimensions not in (None, self.dimensions):
            found.append(f"it has {self.dimensions} dimensions, not {claim.dimensions}")
        if claim.metric is not None and claim.metric != self.metric:
            found.append(f"its metric is {self.metric.name.lower()}, not {claim.metric.name.lower()}")
        if claim.fields is None:
            return found
        mine, theirs = ({one.name: one for one in fields} for fields in (self.fields, claim.fields))
        return found + [
            f"field {name!r} is {_words(mine.get(name))}, not {_words(theirs.get(name))}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The caller's expectations. Every value that is not None must match an existing collection."""

    dimensions: int | None = None
    metric: Metric | None = None
    fields: tuple[Field, ...] | None = None

    def __post_init__(self) -> None:
        # Refuse values that no collection can have.
        Collection(dimensions=1 if self.dimensions is None else self.dimensions, fields=self.fields or ())

    def new(self) -> Collection:
        """Return the collection to create. Raises `ConfigError` without dimensions."""
        if self.dimensions is None:
            raise ConfigError("the collection does not exist yet: set its dimensions to create it")
        metric = Metric.L2 if self.metric is None else self.metric
        return Collection(dimensions=self.dimensions, metric=metric, fields=self.fields or ())


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """An embedding with an id and attributes.

    The components are converted to 32-bit floats. Raises `InvalidInput` if they are not numbers. The
    collection checks whether they fit.
    """

    id: str
    vector: Floats
    attributes: Mapping[str, Scalar] = field(default_factory=lambda: MappingProxyType({}))

    def __init__(self, id: str, vector: Components, attributes: Mapping[str, Scalar] | None = None) -> None:
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "vector", components(vector))
        object.__setattr__(self, "attributes", dict(attributes or {}))

    @property
    def estimated_bytes(self) -> int:
        texts = sum(len(value) for value in self.attributes.values() if isinstance(value, str))
        return 200 + self.vector.nbytes + 100 * len(self.attributes) + texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One result of a search, with the attributes that the search requested."""

    id: str
    score: float
    attributes: Mapping[str, Scalar]
    vector: Floats | None = None


class Hits(list[Hit]):
    """The results of a search, best first."""

    def __init__(self, hits: Iterable[Hit] = (), *, damaged: Sequence[str] = ()) -> None:
        super().__init__(hits)
        self.damaged = tuple(damaged)
        """Ids of results that were left out because their stored records are damaged."""


def components(numbers: Components) -> Floats:
    """Return a private copy of the numbers as 32-bit floats. Raises `InvalidInput`."""
    try:
        with np.errstate(over="ignore"):  # too large values become infinite, and are refused later
            made = np.array(numbers, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"a vector must be a list of numbers: {error}") from None
    if made.ndim != 1:
        raise InvalidInput(f"a vector must be a list of numbers, not {made.ndim}-dimensional")
    made.flags.writeable = False
    return made


def check_id(external_id: object) -> None:
    """Check an id. Raises `InvalidInput`."""
    if not isinstance(external_id, str) or not external_id:
        raise InvalidInput("an id must be a non-empty text")
    if utf8_length(external_id) > ID_BYTES_MAX:
        raise InvalidInput(f"an id may have at most {ID_BYTES_MAX} bytes: {external_id[:80]!r}")


def check_attribute(whose: str, name: str, value: object, kind: FieldType | None) -> None:
    """Check that `value` has this type, or a supported type for None. Raises `InvalidInput`."""
    if not isinstance(name, str) or not name or name == VECTOR_FIELD or utf8_length(name) > _TEXT_BYTES_MAX:
        raise InvalidInput(f"{whose!r}: an attribute cannot have the name {str(name)[:80]!r}")
    if kind is not None and not fits(value, kind):
        raise InvalidInput(f"{whose!r}: field {name!r} is {kind.value}, not {type(value).__name__}")
    if kind is None and not fits(value, _own_kind(value)):
        raise InvalidInput(f"{whose!r}: attribute {name!r} is not a text, 64-bit integer, number or flag")
    if isinstance(value, str) and utf8_length(value) > _TEXT_BYTES_MAX:
        raise InvalidInput(f"{whose!r}: attribute {name!r} is longer than {_TEXT_BYTES_MAX:,} bytes")


def _own_kind(value: object) -> FieldType:
    """Return the type of a value without a schema. A whole number is never a float."""
    if isinstance(value, bool):
        return FieldType.BOOL
    if isinstance(value, int):
        return FieldType.INT64
    return FieldType.FLOAT64 if isinstance(value, float) else FieldType.STRING


def _check_key(whose: str, name: str, value: str) -> None:
    """Check that an indexed text fits into a key, after its field and a tag. Raises `InvalidInput`."""
    if len(metadata_key(name, value.encode())) + 1 > KEY_BYTES_MAX:
        raise InvalidInput(f"{whose!r}: attribute {name[:80]!r} is too long for an indexed field")


def fits(value: object, kind: FieldType) -> bool:
    """Return whether a field of this type can hold the value. Integers have 64 bits, and floats are
    finite."""
    if kind is FieldType.BOOL:
        return isinstance(value, bool)
    if kind is FieldType.INT64:
        return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64
    if kind is FieldType.FLOAT64:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return abs(value) <= sys.float_info.max  # false for infinities and NaN
    return isinstance(value, str)


def utf8_length(text: str) -> int:
    """Return the length in UTF-8. Raises `InvalidInput` for invalid Unicode."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(f"not a Unicode text: {error.reason} at character {error.start}") from None


def _words(one: Field | None) -> str:
    if one is None:
        return "absent"
    return f"{one.type.value}, {'indexed' if one.indexed else 'not indexed'}"
