"""Fingerprints: equal for schemas that may share a segment, different for all others."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.errors import InvalidInput
from penstock.quiver.wal.payload import canonical_text, fingerprint

pytestmark = pytest.mark.unit

BASE = pa.schema([pa.field("a", pa.int64()), pa.field("b", pa.list_(pa.string()))])

DIFFERENT = {
    "order": pa.schema([BASE.field(1), BASE.field(0)]),
    "name": pa.schema([pa.field("A", pa.int64()), BASE.field(1)]),
    "type": pa.schema([pa.field("a", pa.int32()), BASE.field(1)]),
    "nullability": pa.schema([pa.field("a", pa.int64(), nullable=False), BASE.field(1)]),
    "nested type": pa.schema([BASE.field(0), pa.field("b", pa.list_(pa.binary()))]),
    "nested nullability": pa.schema(
        [BASE.field(0), pa.field("b", pa.list_(pa.field("item", pa.string(), nullable=False)))]
    ),
    "large list": pa.schema([BASE.field(0), pa.field("b", pa.large_list(pa.string()))]),
    "dictionary": pa.schema([BASE.field(0), pa.field("b", pa.list_(pa.dictionary(pa.int8(), pa.string())))]),
    "wider dictionary": pa.schema(
        [BASE.field(0), pa.field("b", pa.list_(pa.dictionary(pa.int16(), pa.string())))]
    ),
    "one more": BASE.append(pa.field("c", pa.int8())),
    "nothing": pa.schema([]),
}


def test_a_fingerprint_is_32_bytes() -> None:
    assert len(fingerprint(BASE)) == 32


def test_metadata_does_not_change_the_fingerprint_at_any_depth() -> None:
    inner = pa.list_(pa.field("item", pa.string(), metadata={"x": "y"}))
    marked = pa.schema(
        [pa.field("a", pa.int64(), metadata={"k": "v"}), pa.field("b", inner)], metadata={"m": "n"}
    )
    assert fingerprint(marked) == fingerprint(BASE)


@pytest.mark.parametrize("what", DIFFERENT)
def test_every_other_difference_changes_the_fingerprint(what: str) -> None:
    assert fingerprint(DIFFERENT[what]) != fingerprint(BASE)


def test_all_different_schemas_have_different_fingerprints() -> None:
    assert len({fingerprint(schema) for schema in DIFFERENT.values()}) == len(DIFFERENT)


def test_a_name_cannot_imitate_the_end_of_another_field() -> None:
    one = pa.schema([pa.field('a":int64?,"b', pa.int64())])
    two = pa.schema([pa.field("a", pa.int64()), pa.field("b", pa.int64())])
    assert fingerprint(one) != fingerprint(two)


def test_the_names_inside_a_map_do_not_change_the_fingerprint() -> None:
    named = pa.map_(pa.field("k", pa.string(), nullable=False), pa.field("v", pa.int64()))
    plain = pa.map_(pa.string(), pa.int64())
    assert fingerprint(pa.schema([("m", named)])) == fingerprint(pa.schema([("m", plain)]))


def test_the_text_is_stable() -> None:
    nested = pa.struct([("x", pa.timestamp("ns", "UTC")), ("y", pa.list_(pa.float64(), 2))])
    schema = pa.schema([pa.field("s", nested), pa.field("id", pa.binary(16), nullable=False)])
    assert canonical_text(schema) == (
        '"s":struct("x":timestamp[ns, tz=UTC]?,"y":fixed_size_list[2]("item":double?)?)?,'
        '"id":fixed_size_binary[16]!'
    )


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    kind = pa.int8()
    for _ in range(80):
        kind = pa.list_(kind)
    with pytest.raises(InvalidInput, match="64 levels"):
        fingerprint(pa.schema([("deep", kind)]))
