"""Which columns of a row make a vector, checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError
from penstock.spark.databases.options import listed, name_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["VECTOR_FORMAT", "VECTOR_OPTIONS", "VectorColumns"]

VECTOR_FORMAT: Final = "penstock-vector"
VECTOR_OPTIONS: Final = ("attributes", "delete", "dimensions", "id", "vector")
DIMENSIONS_MAX: Final = 65_535
_RESERVED: Final = "vector"
"""The name under which the embedding itself is stored among the attributes."""
_VECTORS: Final = ("array<float>", "array<double>")
_ATTRIBUTES: Final = (
    "string",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "boolean",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorColumns:
    """What becomes of the columns. Raises `ConfigError` for what no row could satisfy."""

    id: str = "id"
    vector: str = "vector"
    attributes: tuple[str, ...] | None = None
    """None: all other columns."""
    delete: str | None = None
    """A flag: where it is true, the id is deleted and the rest of the row does not matter."""
    dimensions: int | None = None
    """What the collection has; without it all rows of a write must only agree."""

    def __post_init__(self) -> None:
        taken = [self.id, self.vector, *([self.delete] if self.delete else []), *(self.attributes or ())]
        if len(set(taken)) < len(taken):
            raise ConfigError(f"a column is named twice in {', '.join(taken)}")
        if self.dimensions is not None and not 1 <= self.dimensions <= DIMENSIONS_MAX:
            raise ConfigError(f"dimensions: expected 1 to {DIMENSIONS_MAX}, found {self.dimensions}")

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> VectorColumns:
        """From the options of the format."""
        dimensions = given.get("dimensions")
        if dimensions is not None and not dimensions.strip().isdigit():
            raise ConfigError(f"dimensions: expected a whole number, found {dimensions!r}")
        return cls(
            id=name_of("id", given.get("id", "id")),
            vector=name_of("vector", given.get("vector", "vector")),
            attributes=listed(given.get("attributes")),
            delete=name_of("delete", given["delete"]) if "delete" in given else None,
            dimensions=None if dimensions is None else int(dimensions),
        )

    def to_options(self) -> dict[str, str]:
        """What `parse` reads."""
        told = {"id": self.id, "vector": self.vector}
        if self.attributes is not None:
            told["attributes"] = ",".join(self.attributes)
        if self.delete is not None:
            told["delete"] = self.delete
        return told | ({} if self.dimensions is None else {"dimensions": str(self.dimensions)})

    def attribute_columns(self, schema: StructType) -> tuple[str, ...]:
        """The attributes of rows with these columns. Raises `ConfigError` unless all are there and fit."""
        kinds = {column.name: column.dataType.simpleString() for column in schema.fields}
        if len(kinds) < len(schema.fields):
            raise ConfigError(f"{VECTOR_FORMAT}: a column is there twice in {', '.join(schema.fieldNames())}")
        _demand(kinds, self.id, ("string",))
        _demand(kinds, self.vector, _VECTORS)
        if self.delete is not None:
            _demand(kinds, self.delete, ("boolean",))
        others = tuple(name for name in kinds if name not in (self.id, self.vector, self.delete))
        attributes = others if self.attributes is None else self.attributes
        for name in attributes:
            if name == _RESERVED or not name:
                raise ConfigError(f"{VECTOR_FORMAT}: an attribute cannot have the name {name!r}; use AS")
            _demand(kinds, name, _ATTRIBUTES)
        return attributes


def _demand(kinds: Mapping[str, str], name: str, right: tuple[str, ...]) -> None:
    if name not in kinds:
        raise ConfigError(
            f"{VECTOR_FORMAT}: the rows have no column {name!r}; they have {', '.join(kinds) or 'none'}"
        )
    if kinds[name] not in right:
        raise ConfigError(
            f"{VECTOR_FORMAT}: column {name!r} is {kinds[name]}, and must be {' or '.join(right)}: cast it, "
            "or list the columns that are attributes as `attributes`"
        )
