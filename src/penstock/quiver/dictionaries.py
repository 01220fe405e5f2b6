"""One dictionary per field: what an Arrow file permits, where batches come each with their own.

Columns are brought together in the first of these ways that works:

1. as they are, when no dictionary is anywhere in them;
2. with one dictionary for all batches;
3. the same with wider indices;
4. decoded to plain values.

Boundaries between batches stay where they are, and so do the values. Only the way in which they are stored
may change, and with it the type of the column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

__all__ = ["has_dictionary", "plain_type", "unify"]

_WIDER: Final = {
    pa.int8(): (pa.int16(), pa.int32()),
    pa.uint8(): (pa.int16(), pa.int32()),
    pa.int16(): (pa.int32(),),
    pa.uint16(): (pa.int32(),),
}


def unify(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The same batches, all under the first one's schema, with one dictionary per field.

    The batches have equal schemas, metadata aside.
    """
    first = batches[0].schema
    fields: list[pa.Field] = []
    columns: list[list[pa.Array]] = []
    for place, field in enumerate(first):
        chunks = [batch.column(place) for batch in batches]
        if has_dictionary(field.type) and len(chunks) > 1:
            chunks = _unified(chunks, field.type)
        fields.append(field.with_type(chunks[0].type) if chunks[0].type != field.type else field)
        columns.append(chunks)
    schema = pa.schema(fields, metadata=first.metadata)
    return [_batch(index, batch, columns, schema) for index, batch in enumerate(batches)]


def _batch(
    index: int, batch: pa.RecordBatch, columns: Sequence[Sequence[pa.Array]], schema: pa.Schema
) -> pa.RecordBatch:
    if not columns:
        return batch.replace_schema_metadata(schema.metadata)
    return pa.RecordBatch.from_arrays([column[index] for column in columns], schema=schema)


def has_dictionary(kind: pa.DataType) -> bool:
    """Whether a dictionary is anywhere in the type."""
    if pa.types.is_dictionary(kind):
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return has_dictionary(kind.storage_type)
    return any(has_dictionary(kind.field(place).type) for place in range(kind.num_fields))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without dictionaries, at any depth."""
    return _mapped(kind, None)


def _unified(chunks: list[pa.Array], kind: pa.DataType) -> list[pa.Array]:
    for wider in _candidates(kind):
        try:
            cast = chunks if wider == kind else [chunk.cast(wider) for chunk in chunks]
            return list(pa.chunked_array(cast, wider).unify_dictionaries().chunks)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
    return [_decoded(chunk, plain_type(kind)) for chunk in chunks]


def _candidates(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    for index in (pa.int16(), pa.int32()):
        wider = _mapped(kind, index)
        if wider != kind:
            yield wider


def _decoded(chunk: pa.Array, plain: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(chunk.type) and not has_dictionary(chunk.type.value_type):
        return chunk.dictionary_decode()
    try:
        return chunk.cast(plain)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Types that Arrow itself cannot convert, such as dictionaries in unions: rare, so value by value.
        return pa.array(chunk.to_pylist(), plain)


def _mapped(kind: pa.DataType, index: pa.DataType | None) -> pa.DataType:
    """`kind` with every dictionary's indices widened to `index`, or without dictionaries when it is None."""
    if isinstance(kind, pa.BaseExtensionType):
        return _mapped(kind.storage_type, index) if has_dictionary(kind) else kind
    if pa.types.is_dictionary(kind):
        if index is None:
            return _mapped(kind.value_type, None)
        wider = index if index in _WIDER.get(kind.index_type, ()) else kind.index_type
        return pa.dictionary(wider, kind.value_type, kind.ordered)
    return _rebuilt(kind, index) if has_dictionary(kind) else kind


def _rebuilt(kind: pa.DataType, index: pa.DataType | None) -> pa.DataType:
    """A nested type with its children mapped."""
    children = [kind.field(place) for place in range(kind.num_fields)]
    if pa.types.is_map(kind):
        key, item = kind.key_field, kind.item_field
        return pa.map_(_mapped_field(key, index), _mapped_field(item, index), kind.keys_sorted)
    mapped = [_mapped_field(child, index) for child in children]
    if pa.types.is_struct(kind):
        return pa.struct(mapped)
    if pa.types.is_union(kind):
        return pa.union(mapped, kind.mode, kind.type_codes)
    if pa.types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, mapped[1].type)
    return _list_of(kind, mapped[0])


def _list_of(kind: pa.DataType, child: pa.Field) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(child, kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(child)
    if pa.types.is_list_view(kind):
        return pa.list_view(child)
    if pa.types.is_large_list_view(kind):
        return pa.large_list_view(child)
    return pa.list_(child)


def _mapped_field(field: pa.Field, index: pa.DataType | None) -> pa.Field:
    return field.with_type(_mapped(field.type, index))
