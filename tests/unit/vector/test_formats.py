"""Bytes in storage and in queues: append-only golden files, sort orders, and the errors for damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from penstock.errors import Corrupt, InvalidInput
from penstock.vector import Collection, Field, FieldType, Metric, Vector, merge_records
from penstock.vector.codec import (
    decode_block,
    decode_centroid,
    decode_collection,
    decode_id,
    decode_ids,
    decode_metadata,
    decode_posting,
    decode_vector,
    encode_block,
    encode_centroid,
    encode_collection,
    encode_id,
    encode_ids,
    encode_metadata,
    encode_posting,
    encode_vector,
    index_value,
    merge_postings,
)
from penstock.vector.keys import (
    CENTROID_LEVEL,
    RecordType,
    centroid_key,
    data_key,
    dictionary_key,
    metadata_key,
    posting_key,
    read_dictionary_key,
    read_id_key,
    read_metadata_key,
    record_prefix,
    record_type,
)
from penstock.vector.records import (
    DELETE_METADATA,
    UPSERT_METADATA,
    decode_record,
    encode_deletes,
    encode_upserts,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "vector"
COLLECTION = Collection(
    dimensions=2,
    metric=Metric.COSINE,
    fields=(
        Field(name="lang", type=FieldType.STRING, indexed=True),
        Field(name="body", type=FieldType.TEXT),
        Field(name="année", type=FieldType.INT64, indexed=True),
    ),
)
VECTOR = Vector("é/1", [0.5, -2], {"année": -3, "lang": "en", "f": 1.5, "b": True})
IDS = np.array([1, 258], np.uint64)
ROWS = np.array([[1, 2], [3, 4]], np.float32)


def hexed(data: bytes) -> str:
    return data.hex(" ", 4) + "\n"


def described() -> dict[str, bytes]:
    """Return an example of each format, by the name of its golden file."""
    return {
        "collection": encode_collection(COLLECTION),
        "data": encode_vector(VECTOR),
        "posting": encode_posting(IDS, ROWS, np.array([5], np.uint64)),
        "block": encode_block(4096, 4096),
        "id": encode_id(258),
        "centroid": encode_centroid(ROWS[0]),
        "metadata": encode_metadata([1, 2**40], [2]),
        "deletions": encode_ids([3, 2**33]),
        "key-posting": posting_key(CENTROID_LEVEL + 2),
        "key-centroid": centroid_key(CENTROID_LEVEL + 2),
        "key-data": data_key(258),
        "key-dictionary": dictionary_key("a\0\x01é"),
        "key-metadata-string": metadata_key("lang", index_value("en")),
        "key-metadata-int": metadata_key("année", index_value(-3)),
        "key-metadata-float": metadata_key("f", index_value(-1.5)),
        "key-metadata-bool": metadata_key("b", index_value(True)),
        "key-deletions": record_prefix(RecordType.DELETIONS),
        "key-position": record_prefix(RecordType.POSITION),
        "record-upsert": encode_upserts([VECTOR]),
        "record-delete": encode_deletes(["a", "é"]),
    }


@pytest.mark.parametrize("name", described())
def test_bytes_are_those_of_the_golden_files(name: str) -> None:
    assert hexed(described()[name]) == (GOLDEN / f"{name}.hex").read_text()


def test_values_come_back_as_they_were() -> None:
    assert decode_collection(encode_collection(COLLECTION)) == COLLECTION
    back = decode_vector(encode_vector(VECTOR), 2)
    assert (back.id, back.vector.tolist(), back.attributes) == ("é/1", [0.5, -2], VECTOR.attributes)
    assert decode_block(encode_block(1, 2)) == (1, 2)
    assert decode_id(encode_id(2**64 - 1)) == 2**64 - 1
    assert decode_centroid(encode_centroid(ROWS[1]), 2).tolist() == [3, 4]
    posting = decode_posting(encode_posting(IDS[::-1], ROWS, np.array([5], np.uint64)), 2)
    assert posting.ids.tolist() == [1, 258]
    assert posting.rows.tolist() == [[3, 4], [1, 2]]
    assert posting.removed.tolist() == [5]
    included, excluded = decode_metadata(encode_metadata([1, 2**40], [2]))
    assert (list(included), list(excluded)) == ([1, 2**40], [2])


def test_keys_come_back_as_they_were() -> None:
    assert read_id_key(posting_key(CENTROID_LEVEL + 1)) == CENTROID_LEVEL + 1
    assert read_dictionary_key(dictionary_key("a\0\x01é")) == "a\0\x01é"
    assert read_metadata_key(metadata_key("a\0", b"\x00x")) == ("a\0", b"\x00x")
    for kind in RecordType:
        assert record_type(record_prefix(kind) + b"more") is kind


def test_the_bytes_of_indexed_values_sort_as_the_values_do() -> None:
    integers = [-(2**63), -5, -1, 0, 1, 7, 2**63 - 1]
    floats = [float("-inf"), -1e300, -1.5, -1e-300, 0.0, 1e-300, 2.0, float("inf")]
    texts = ["", "a", "ab", "b", "é"]
    for values in (integers, floats, texts, [False, True]):
        encoded = [index_value(value) for value in values]
        assert encoded == sorted(encoded)
        assert len(set(encoded)) == len(values)
    assert index_value(-0.0) == index_value(0.0)
    assert len({index_value(value) for value in (1, 1.0, True, "1")}) == 4


def test_the_newer_entry_of_a_list_wins_whatever_is_merged_first() -> None:
    rng = np.random.default_rng(0)

    def operand() -> bytes:
        ids = rng.permutation(600)[:7].astype(np.uint64)
        return encode_posting(ids[:4], rng.normal(size=(4, 3)).astype(np.float32), ids[4:])

    for _ in range(300):
        a, b, c = operand(), operand(), operand()
        whole = merge_postings([a, b, c])
        assert (
            whole
            == merge_postings([merge_postings([a, b]), c])
            == merge_postings([a, merge_postings([b, c])])
        )
        model: dict[int, list[float] | None] = {}
        for one in (a, b, c):
            posting = decode_posting(one, 3)
            model.update(dict.fromkeys(posting.removed.tolist()))
            model.update(zip(posting.ids.tolist(), posting.rows.tolist(), strict=True))
        merged = decode_posting(whole, 3)
        assert dict(zip(merged.ids.tolist(), merged.rows.tolist(), strict=True)) == {
            one: row for one, row in model.items() if row is not None
        }
        assert merged.removed.tolist() == sorted(one for one, row in model.items() if row is None)


def test_sets_are_merged_by_union() -> None:
    key = record_prefix(RecordType.DELETIONS)
    assert list(decode_ids(merge_records(key, [encode_ids([1]), encode_ids([2, 2**40])]))) == [1, 2, 2**40]
    included, excluded = decode_metadata(
        merge_records(
            metadata_key("a", b"\x00"),
            [encode_metadata([1, 2]), encode_metadata([3], [1]), encode_metadata([], [3])],
        )
    )
    assert (list(included), list(excluded)) == ([1, 2, 3], [1, 3])


DECODERS: dict[str, Callable[[bytes], object]] = {
    "collection": decode_collection,
    "data": lambda data: decode_vector(data, 2),
    "posting": lambda data: decode_posting(data, 2),
    "block": decode_block,
    "id": decode_id,
    "centroid": lambda data: decode_centroid(data, 2),
    "metadata": decode_metadata,
    "deletions": decode_ids,
}


MERGED = {
    "posting": posting_key(CENTROID_LEVEL + 2),
    "metadata": metadata_key("lang", index_value("en")),
    "deletions": record_prefix(RecordType.DELETIONS),
}


@pytest.mark.parametrize("name", MERGED)
def test_a_merge_with_something_damaged_is_kept_and_corrupt_when_read(name: str) -> None:
    good = described()[name]
    for damaged in (
        b"",
        good[:1],
        good[:-1],
        good[:-4],
        good[:-8],
        b"\xff" + good,
        b"\xff\xff\xff\xff" + good,
    ):
        for operands in ([damaged, good], [good, damaged]):
            merged = merge_records(MERGED[name], operands)
            more = merge_records(MERGED[name], [merged, good])
            for one in (merged, more):
                with pytest.raises(Corrupt):
                    DECODERS[name](one)
            assert more.endswith(b"".join(operands) + good)
            assert len(more) - len(merged) == len(good)  # the mark occurs only once


def test_a_merge_into_a_type_that_is_not_merged_is_corrupt_when_read() -> None:
    data = described()["data"]
    with pytest.raises(Corrupt):
        decode_vector(merge_records(data_key(1), [data, data]), 2)
    assert merge_records(b"no such key", [data, data]).endswith(data + data)


def test_rows_of_another_width_or_past_the_data_are_not_merged_into_a_list() -> None:
    good = encode_posting(IDS, ROWS)
    wide = encode_posting(IDS, np.ones((2, 3), np.float32))
    behind = good[:12] + (9).to_bytes(4, "little") + good[16:]
    for wrong in (wide, behind, good[:-8], encode_posting(IDS, ROWS[:0])):
        with pytest.raises(Corrupt):
            merge_postings([good, wrong])


@pytest.mark.parametrize("name", DECODERS)
def test_a_value_that_is_cut_anywhere_is_corrupt(name: str) -> None:
    data = described()[name]
    DECODERS[name](data)
    for end in range(len(data)):
        with pytest.raises(Corrupt):
            DECODERS[name](data[:end])


def test_a_list_whose_entries_are_wrong_is_corrupt() -> None:
    good = encode_posting(IDS, ROWS)
    swapped = good[:4] + good[16:28] + good[4:16] + good[28:]
    behind = good[:12] + (9).to_bytes(4, "little") + good[16:]
    for wrong in (swapped, behind, good + b"\0"):
        with pytest.raises(Corrupt):
            decode_posting(wrong, 2)


# Records of a queue


def message_classes() -> dict[str, type]:
    """Return the message classes of the protobuf library, from descriptors defined here."""
    file = descriptor_pb2.FileDescriptorProto(name="v.proto", package="v", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str, bool]) -> descriptor_pb2.DescriptorProto:
        made = file.message_type.add(name=name)
        for field, number, kind, of, repeated in fields:
            made.field.add(
                name=field, number=number, type=kind, type_name=of or None, label=3 if repeated else 1
            )
        return made

    message("Floats", ("values", 1, 2, "", True))
    value = message(
        "Value", ("s", 1, 9, "", False), ("i", 2, 3, "", False), ("d", 3, 1, "", False),
        ("b", 4, 8, "", False), ("v", 5, 11, ".v.Floats", False),
    )  # fmt: skip
    value.oneof_decl.add(name="value")
    for field in value.field:
        field.oneof_index = 0
    vector = message("Vector", ("id", 1, 9, "", False), ("attributes", 3, 11, ".v.Vector.E", True))
    entry = vector.nested_type.add(name="E")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=11, type_name=".v.Value", label=1)
    message("WriteRequest", ("vectors", 1, 11, ".v.Vector", True))
    message("DeleteRequest", ("ids", 1, 9, "", True))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v.{name}"))
        for name in ("WriteRequest", "DeleteRequest")
    }


MESSAGES = message_classes()


def test_records_are_read_as_the_protobuf_library_writes_them() -> None:
    request = MESSAGES["WriteRequest"]()
    one = request.vectors.add(id="é/1")
    one.attributes["vector"].v.values.extend([0.5, -2])
    one.attributes["année"].i = -3
    one.attributes["lang"].s = "en"
    one.attributes["f"].d = 1.5
    one.attributes["b"].b = True
    ((name, read),) = decode_record(request.SerializeToString(), UPSERT_METADATA)
    assert name == "é/1"
    assert read is not None
    assert read.vector.tolist() == [0.5, -2]
    assert read.attributes == VECTOR.attributes
    assert type(read.attributes["b"]) is bool
    deletes = MESSAGES["DeleteRequest"](ids=["a", "b"]).SerializeToString()
    assert decode_record(deletes, DELETE_METADATA) == [("a", None), ("b", None)]


def test_records_are_written_as_the_protobuf_library_reads_them() -> None:
    request = MESSAGES["WriteRequest"]()
    request.ParseFromString(encode_upserts([VECTOR, Vector("x", [1, 2], {"n": 2**62})]))
    assert [one.id for one in request.vectors] == ["é/1", "x"]
    attributes = request.vectors[0].attributes
    assert list(attributes["vector"].v.values) == [0.5, -2]
    assert (attributes["année"].i, attributes["lang"].s) == (-3, "en")
    assert (attributes["f"].d, attributes["b"].b) == (1.5, True)
    assert request.vectors[1].attributes["n"].i == 2**62
    deletes = MESSAGES["DeleteRequest"]()
    deletes.ParseFromString(encode_deletes(["a", "é"]))
    assert list(deletes.ids) == ["a", "é"]


def test_floats_may_also_come_one_by_one_and_unknown_fields_are_passed_over() -> None:
    floats = b"".join(b"\x0d" + np.float32(number).tobytes() for number in (1, 2))
    value = b"\x2a" + bytes((len(floats),)) + floats
    attribute = b"\x0a\x06vector\x12" + bytes((len(value),)) + value
    one = b"\x0a\x01a\x50\x07\x1a" + bytes((len(attribute),)) + attribute
    ((_, read),) = decode_record(b"\x78\x01\x0a" + bytes((len(one),)) + one, UPSERT_METADATA)
    assert read is not None
    assert read.vector.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("record", "metadata"),
    [
        (encode_upserts([VECTOR]), b""),
        (encode_upserts([VECTOR]), b"\x01\x01"),
        (encode_upserts([VECTOR]), b"\x02\x01\x01"),
        (encode_upserts([VECTOR]), b"\x01\x03\x01"),
        (encode_upserts([VECTOR]), b"\x01\x01\x02"),
        (encode_upserts([VECTOR])[:-1], UPSERT_METADATA),
        (encode_upserts([VECTOR]), DELETE_METADATA),
        (b"\x0a\x02\x0a\x00", UPSERT_METADATA),  # no embedding
        (b"\x0b", UPSERT_METADATA),  # a group
        (b"\x00\x00", UPSERT_METADATA),  # field number 0
        (b"\xff" * 11, UPSERT_METADATA),
        (b"\x08\x01", UPSERT_METADATA),
        (b"\x0a\x02\xff\xfe", DELETE_METADATA),
        (encode_deletes(["x" * 65]), DELETE_METADATA),
        (encode_deletes([""]), DELETE_METADATA),
    ],
)
def test_records_that_say_nothing_sensible_are_refused(record: bytes, metadata: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_record(record, metadata)
