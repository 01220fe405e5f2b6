"""What makes two batches the same kind: a hash of their schema without its metadata.

The hash is taken over a canonical text: the fields in order, each with its name, its type and whether it may
be null, down to the last nested field. Names are written as JSON strings, so that none can pass for another.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from penstock.errors import InvalidInput

__all__ = ["FINGERPRINT_BYTES", "canonical_text", "fingerprint"]

FINGERPRINT_BYTES: Final = 32
_DEPTH_MAX: Final = 64


@functools.lru_cache(maxsize=4096)
def fingerprint(schema: pa.Schema) -> bytes:
    """32 bytes that are equal for schemas that differ in metadata only.

    Raises `InvalidInput` for a schema that is nested more than 64 levels deep.
    """
    return hashlib.blake2b(canonical_text(schema).encode(), digest_size=FINGERPRINT_BYTES).digest()


def canonical_text(schema: pa.Schema) -> str:
    """The text that is hashed; the same for equal schemas in every version of Arrow."""
    return _fields(schema, 0)


def _fields(fields: Iterable[pa.Field], depth: int) -> str:
    return ",".join(_field(field, depth) for field in fields)


def _field(field: pa.Field, depth: int) -> str:
    return f"{json.dumps(field.name)}:{_type(field.type, depth + 1)}{'?' if field.nullable else '!'}"


def _type(kind: pa.DataType, depth: int) -> str:
    if depth > _DEPTH_MAX:
        raise InvalidInput(f"a schema nested more than {_DEPTH_MAX} levels deep is not accepted")
    if isinstance(kind, pa.BaseExtensionType):
        return f"extension({json.dumps(str(kind))},{_type(kind.storage_type, depth + 1)})"
    if pa.types.is_dictionary(kind):
        inner = f"{_type(kind.index_type, depth + 1)},{_type(kind.value_type, depth + 1)}"
        return f"dictionary({inner},{'ordered' if kind.ordered else 'unordered'})"
    if pa.types.is_run_end_encoded(kind):
        return f"ree({_type(kind.run_end_type, depth + 1)},{_type(kind.value_type, depth + 1)})"
    if pa.types.is_map(kind):
        # The names inside a map carry no meaning, and implementations disagree about them.
        order = "sorted" if kind.keys_sorted else "unsorted"
        value = f"{_type(kind.item_type, depth + 1)}{'?' if kind.item_field.nullable else '!'}"
        return f"map({_type(kind.key_type, depth + 1)},{value},{order})"
    if kind.num_fields:
        children = _fields((kind.field(place) for place in range(kind.num_fields)), depth)
        return f"{_head(kind)}({children})"
    return str(kind)


def _head(kind: pa.DataType) -> str:
    """A nested type without its children."""
    if pa.types.is_fixed_size_list(kind):
        return f"fixed_size_list[{kind.list_size}]"
    if pa.types.is_union(kind):
        return f"{kind.mode}_union[{','.join(map(str, kind.type_codes))}]"
    if pa.types.is_struct(kind):
        return "struct"
    return str(kind).partition("<")[0]
