"""The mapping of columns to vectors, checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import ConfigError, InvalidInput
from penstock.protowire import varint
from penstock.spark.sinks.options import listed, name_of
from penstock.spark.sinks.wire import (
    RECORD_COLUMNS,
    as_column,
    content,
    field,
    fixed_rows,
    integers,
    joined,
    message,
    pieces,
    present,
    rows_of,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

VECTOR_FORMAT: Final = "penstock-vector"
VECTOR_OPTIONS: Final = ("attributes", "delete", "dimensions", "id", "vector")
DIMENSIONS_MAX: Final = 65_535
_RESERVED: Final = "vector"
"""The attribute name that stores the embedding itself."""
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
    """The role of each column. Raises `ConfigError` for roles that no row can satisfy."""

    id: str = "id"
    vector: str = "vector"
    attributes: tuple[str, ...] | None = None
    """None: all other columns."""
    delete: str | None = None
    """A boolean column. If it is true, the id is deleted and the other columns of the row are ignored."""
    dimensions: int | None = None
    """The dimensions of the collection. If None, all vectors of a write must have equal dimensions."""

    def __post_init__(self) -> None:
        taken = [self.id, self.vector, *([self.delete] if self.delete else []), *(self.attributes or ())]
        if len(set(taken)) < len(taken):
            raise ConfigError(f"a column is named twice in {', '.join(taken)}")
        if self.dimensions is not None and not 1 <= self.dimensions <= DIMENSIONS_MAX:
            raise ConfigError(f"dimensions: expected 1 to {DIMENSIONS_MAX}, found {self.dimensions}")

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> VectorColumns:
        """Parse the options of the format. Raise `ConfigError` for an invalid one."""
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
        """Return the options that `parse` reads."""
        given = {"id": self.id, "vector": self.vector}
        if self.attributes is not None:
            given["attributes"] = ",".join(self.attributes)
        if self.delete is not None:
            given["delete"] = self.delete
        return given | ({} if self.dimensions is None else {"dimensions": str(self.dimensions)})

    def attribute_columns(self, schema: StructType) -> tuple[str, ...]:
        """Return the attribute columns of this schema.

        Raise `ConfigError` if a column is missing or unsuitable.
        """
        kinds = {column.name: column.dataType.simpleString() for column in schema.fields}
        if len(kinds) < len(schema.fields):
            raise ConfigError(f"{VECTOR_FORMAT}: a column occurs twice in {', '.join(schema.fieldNames())}")
        _demand(kinds, self.id, ("string",))
        _demand(kinds, self.vector, _VECTORS)
        if self.delete is not None:
            _demand(kinds, self.delete, ("boolean",))
        others = tuple(name for name in kinds if name not in (self.id, self.vector, self.delete))
        attributes = others if self.attributes is None else self.attributes
        for name in attributes:
            if name == _RESERVED or not name:
                raise ConfigError(
                    f"{VECTOR_FORMAT}: an attribute cannot have the name {name!r}; rename it with AS"
                )
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
            "or list the attribute columns in `attributes`"
        )


UPSERT_PAYLOAD: Final = b"\x01\x01\x01"
DELETE_PAYLOAD: Final = b"\x01\x02\x01"
"""The metadata payloads in a queue: version 1, upsert or delete, protobuf."""
RECORD_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 16
ID_BYTES_MAX: Final = 64
TEXT_BYTES_MAX: Final = 65_535
COMPONENT_MAX: Final = 1e15

_EMBEDDING: Final = b"vector"
_DOUBLE_TAG: Final = b"\x19"
_FLOAT: Final = np.dtype("<f4")


class VectorRows:
    """The encoder of one task's rows. It remembers the digests of their ids."""

    def __init__(self, columns: VectorColumns, attributes: tuple[str, ...]) -> None:
        self._columns = columns
        self._attributes = attributes
        self._digests: list[bytes] = []
        self.dimensions = columns.dimensions

    @property
    def digests(self) -> bytes:
        """The concatenated digests of the ids, `DIGEST_BYTES` for each."""
        return b"".join(self._digests)

    def records(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a queue's records with the columns `value` and `metadata`.

        Raise `InvalidInput` for invalid rows.
        """
        for batch in batches:
            if not batch.num_rows:
                continue
            self._take_ids(batch.column(self._columns.id))
            upserts, deletes = self._divided(batch)
            for rows, encode, payload in (
                (upserts, self._upserts, UPSERT_PAYLOAD),
                (deletes, self._deletes, DELETE_PAYLOAD),
            ):
                if rows.num_rows:
                    yield _records(encode(rows), payload)

    def _divided(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        if self._columns.delete is None:
            return batch, batch[:0]
        gone = pc.fill_null(batch.column(self._columns.delete), False)
        return batch.filter(pc.invert(gone)), batch.filter(gone)

    def _take_ids(self, ids: pa.Array) -> None:
        name = self._columns.id
        lengths = pc.binary_length(ids)
        if ids.null_count or pc.min(lengths).as_py() == 0:
            raise InvalidInput(f"{name} is null or empty in some rows, but every vector needs an id")
        if pc.max(lengths).as_py() > ID_BYTES_MAX:
            longest = ids[pc.index(lengths, pc.max(lengths)).as_py()].as_py()
            raise InvalidInput(f"{name} may have at most {ID_BYTES_MAX} bytes: {longest[:80]!r} is longer")
        counted = pc.value_counts(ids)
        twice = counted.field(0).filter(pc.greater(counted.field(1), 1))
        if len(twice):
            raise InvalidInput(f"{name} {twice[0].as_py()!r} occurs in several rows of one write. {_ADVICE}")
        digest = xxhash.xxh3_128_digest
        self._digests.append(b"".join([digest(text) for text in as_column(ids).to_pylist()]))

    def _deletes(self, rows: pa.RecordBatch) -> pa.LargeBinaryArray:
        return field(1, as_column(rows.column(self._columns.id)))

    def _upserts(self, rows: pa.RecordBatch) -> pa.LargeBinaryArray:
        ids = rows.column(self._columns.id)
        embedding = self._embedding(rows.column(self._columns.vector), ids)
        attributes = [_attribute(name, rows.column(name)) for name in self._attributes]
        return field(1, field(1, as_column(ids)), *embedding, *attributes)

    def _embedding(self, column: pa.Array, ids: pa.Array) -> tuple[bytes, pa.LargeBinaryArray]:
        """Return the bytes that precede the components in every row, and the components of each row.

        All vectors have the same length, so these bytes are the same for all rows.
        """
        ends = self._lengths(column, ids)
        values = column.values[int(ends[0]) : int(ends[-1])]
        if values.null_count:
            raise InvalidInput(f"{self._columns.vector} has null components in some rows")
        with np.errstate(over="ignore"):  # a number that is too large becomes infinite and is rejected below
            numbers = values.to_numpy(zero_copy_only=False).astype(_FLOAT)
        if not bool((np.abs(numbers) <= COMPONENT_MAX).all()):  # also false for NaN
            raise InvalidInput(f"{self._columns.vector} has a component outside -1e15 to 1e15 in some rows")
        size = len(numbers) // len(column) * _FLOAT.itemsize
        parts = rows_of(numbers.view(np.uint8), (ends - ends[0]) * _FLOAT.itemsize)
        floats = varint(1 << 3 | 2) + varint(size)
        held = varint(5 << 3 | 2) + varint(len(floats) + size) + floats
        entry = message(1, _EMBEDDING) + varint(2 << 3 | 2) + varint(len(held) + size) + held
        return varint(3 << 3 | 2) + varint(len(entry) + size) + entry, parts

    def _lengths(self, column: pa.Array, ids: pa.Array) -> npt.NDArray[np.int64]:
        """Return the start of each row's components, then their end.

        Raise `InvalidInput` unless all rows have the same number of components.
        """
        name = self._columns.vector
        if column.null_count:
            where = ids.filter(pc.is_null(column))[0].as_py()
            raise InvalidInput(f"{name} is null in {column.null_count} rows, such as that of {where!r}")
        ends = np.asarray(column.offsets).astype(np.int64)
        counts = np.diff(ends)
        if self.dimensions is None:
            self.dimensions = int(counts[0])
        wrong = np.flatnonzero((counts != self.dimensions) | (counts == 0))
        if len(wrong):
            place = int(wrong[0])
            raise InvalidInput(
                f"{name} of {ids[place].as_py()!r} has {counts[place]} components, not {self.dimensions}"
            )
        return ends


_ADVICE: Final = (
    "Keep one row for each id: in a pipeline, set `order_by` to the columns that decide which row is the "
    "last; elsewhere use max_by, or a window with row_number"
)


def repeated_ids(digests: Iterable[bytes]) -> None:
    """Raise `InvalidInput` if an id occurs in several rows of a write, over all tasks."""
    data = b"".join(digests)
    ids = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(DIGEST_BYTES), len(data) // DIGEST_BYTES, [None, pa.py_buffer(data)]
    )
    more = len(ids) - pc.count_distinct(ids).as_py()
    if more:
        raise InvalidInput(f"{more} rows repeat the id of another row of the same write. {_ADVICE}")


def _records(encoded: pa.LargeBinaryArray, payload: bytes) -> pa.RecordBatch:
    records = [content(encoded, start, stop) for start, stop in pieces(encoded, RECORD_BYTES)]
    columns = {"value": records, "metadata": [payload] * len(records)}
    return pa.RecordBatch.from_pydict(columns, RECORD_COLUMNS)


def _attribute(name: str, column: pa.Array) -> pa.LargeBinaryArray:
    """Return each row's entry in the map of attributes, empty for null."""
    return present(field(3, joined(message(1, name.encode()), field(2, _value(name, column)))))


def _value(name: str, column: pa.Array) -> pa.LargeBinaryArray:
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        longest = pc.max(pc.binary_length(column)).as_py() or 0
        if longest > TEXT_BYTES_MAX:
            raise InvalidInput(f"{name} has a text of {longest} bytes; the limit is {TEXT_BYTES_MAX}")
        return field(1, as_column(column))
    if pa.types.is_boolean(kind):
        return integers(4, _whole(column), column.is_valid())
    if pa.types.is_integer(kind):
        return integers(2, _whole(column), column.is_valid())
    doubles = column.cast(pa.float64())
    if pc.any(pc.invert(pc.is_finite(doubles))).as_py():
        raise InvalidInput(f"{name} is infinite or NaN in some rows; make it null: a collection rejects it")
    numbers = pc.fill_null(doubles, 0.0).to_numpy(zero_copy_only=False).astype("<f8")
    encoded = joined(_DOUBLE_TAG, fixed_rows(numbers.view(np.uint8).reshape(-1, 8)))
    return pc.if_else(column.is_valid(), encoded, pa.scalar(None, encoded.type))


def _whole(column: pa.Array) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(numbers)
