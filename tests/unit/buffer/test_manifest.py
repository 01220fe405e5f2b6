from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.buffer.doubles import T0, golden

from penstock.buffer import InvalidInputError, Metadata, SerializationError
from penstock.buffer import manifest as m
from penstock.buffer.dequeue import next_epoch
from penstock.buffer.manifest import Footer, NewEntry

FIRST = "ingest/01HF7YAT000000000000000001.batch"
SECOND = "ingest/01HF7YATS00000000000000002.batch"
ONE = NewEntry(location=FIRST, metadata=[Metadata(start_index=0, ingestion_time_ms=T0)])
TWO = NewEntry(
    location=SECOND,
    metadata=[
        Metadata(start_index=0, ingestion_time_ms=T0 + 800, payload=b"\1\1\1\0"),
        Metadata(start_index=2, ingestion_time_ms=T0 + 850, payload=b"hi"),
    ],
)
SHA = {
    "M0": "74cacf3297b9c5d9",
    "M1": "fc08c2f268ca465b",
    "M2": "e0d1f9b27fabefbb",
    "M3": "283f0df264a013c3",
    "M4": "b16064c7092172a2",
}


def worked_examples() -> dict[str, bytes]:
    m2 = m.append(m.append(m.EMPTY_MANIFEST, [ONE]), [TWO])
    m3 = m.dequeue(m.set_epoch(m2, 1), 0)
    return {
        "M0": m.EMPTY_MANIFEST,
        "M1": m.append(m.EMPTY_MANIFEST, [ONE]),
        "M2": m2,
        "M3": m3,
        "M4": m.dequeue(m3, 1),
    }


def entry(sequence: int, location: bytes, metas: bytes = b"", count: int = 0, tail: bytes = b"") -> bytes:
    """Encode an entry by hand, as any client might."""
    body = struct.pack("<QH", sequence, len(location)) + location + struct.pack("<I", count) + metas + tail
    return struct.pack("<I", len(body)) + body


def footer(count: int, following: int, epoch: int = 0, version: int = 1) -> bytes:
    return struct.pack("<IQQH", count, following, epoch, version)


@pytest.mark.parametrize("name", SHA)
def test_worked_examples_are_encoded_byte_for_byte(name: str) -> None:
    made = worked_examples()[name]
    assert made == golden(f"{name}.manifest")
    assert hashlib.sha256(made).hexdigest().startswith(SHA[name])


def test_golden_manifests_decode_to_their_entries() -> None:
    decoded = m.decode_manifest(golden("M2.manifest"))
    assert decoded.footer == Footer(entry_count=2, next_sequence=2, epoch=0)
    assert [e.sequence for e in decoded.entries] == [0, 1]
    assert [e.location for e in decoded.entries] == [FIRST, SECOND]
    assert [list(e.metadata) for e in decoded.entries] == [list(ONE.metadata), list(TWO.metadata)]
    assert m.decode_manifest(golden("M4.manifest")).footer.next_sequence == 2


def test_two_entries_in_one_append_equal_two_appends() -> None:
    assert m.append(m.EMPTY_MANIFEST, [ONE, TWO]) == golden("M2.manifest")


def test_append_to_foreign_bytes_preserves_them() -> None:
    foreign = golden("foreign.manifest")
    grown = m.append(foreign, [ONE])
    assert grown.startswith(foreign[:-22])
    assert [e.sequence for e in m.decode_manifest(grown).entries] == [7, 8]
    assert m.read_footer(grown).epoch == 5


def test_unknown_bytes_inside_an_entry_survive_append_epoch_and_dequeue() -> None:
    raw = m.append(golden("M1.manifest"), [])
    tailed = raw[:-22] + entry(1, b"x/y", tail=b"UNKNOWN") + entry(2, b"x/z", tail=b"MORE") + footer(3, 3)
    raw = m.dequeue(m.set_epoch(m.append(tailed, [TWO]), 9), 0)
    assert raw.startswith(entry(1, b"x/y", tail=b"UNKNOWN") + entry(2, b"x/z", tail=b"MORE"))
    assert [e.location for e in m.decode_manifest(raw).entries] == ["x/y", "x/z", SECOND]
    assert m.dequeue(raw, 1).startswith(entry(2, b"x/z", tail=b"MORE"))


def test_any_location_is_read_unchanged() -> None:
    (found,) = m.decode_manifest(golden("foreign.manifest")).entries
    assert found.location == "other/01HF7YATS00000000000000002/00000000000000ff"
    assert found.metadata == (Metadata(start_index=0, ingestion_time_ms=T0, payload=b"abc"),)


@pytest.mark.parametrize("name", ["M0", "M1", "M2", "M3", "M4", "foreign"])
def test_truncation_at_every_offset_is_a_serialization_error(name: str) -> None:
    raw = golden(f"{name}.manifest")
    for size in range(len(raw)):
        with pytest.raises(SerializationError):
            m.decode_manifest(raw[:size])
        # The footer is kept, and the body is cut at every offset.
        if size < len(raw) - 22:
            with pytest.raises(SerializationError):
                m.decode_manifest(raw[:size] + raw[-22:])


@pytest.mark.parametrize("version", [0, 2, 99, 65535])
def test_every_other_version_is_refused(version: int) -> None:
    raw = golden("M1.manifest")[:-2] + struct.pack("<H", version)
    for operation in (m.read_footer, m.decode_manifest, lambda data: m.append(data, [ONE]), m.first_sequence):
        with pytest.raises(SerializationError, match=f"version {version}"):
            operation(raw)


def test_the_version_is_checked_before_the_counts() -> None:
    with pytest.raises(SerializationError, match="version 2"):
        m.decode_manifest(footer(2**32 - 1, 0, version=2))


@pytest.mark.parametrize("count", [1, 5, 2**32 - 2])
def test_a_count_larger_than_the_bytes_is_refused(count: int) -> None:
    with pytest.raises(SerializationError):
        m.decode_manifest(footer(count, 2**40))
    with pytest.raises(SerializationError):
        m.decode_manifest(golden("M1.manifest")[:-22] + footer(count + 1, 2**40))


def test_more_entries_than_numbers_is_refused() -> None:
    with pytest.raises(SerializationError, match="numbered only"):
        m.decode_manifest(entry(0, b"a") + entry(1, b"b") + footer(2, 1))


def test_a_metadata_count_larger_than_the_entry_is_refused() -> None:
    with pytest.raises(SerializationError, match="cannot hold"):
        m.decode_manifest(entry(0, b"a", count=2**32 - 1) + footer(1, 1))


def test_a_metadata_payload_larger_than_the_entry_is_refused() -> None:
    metas = struct.pack("<IqI", 0, T0, 2**32 - 1)
    with pytest.raises(SerializationError, match="runs past"):
        m.decode_manifest(entry(0, b"a", metas, 1) + footer(1, 1))
    eaten = struct.pack("<IqI", 0, T0, 10) + bytes(22)
    with pytest.raises(SerializationError, match="runs past"):
        m.decode_manifest(entry(0, b"a", eaten, 2) + footer(1, 1))


def test_bytes_left_between_the_last_entry_and_the_footer_are_refused() -> None:
    raw = golden("M1.manifest")
    with pytest.raises(SerializationError, match="between its last entry"):
        m.decode_manifest(raw[:-22] + b"?" + raw[-22:])
    with pytest.raises(SerializationError, match="between its last entry"):
        m.decode_manifest(b"?" + m.EMPTY_MANIFEST)


@pytest.mark.parametrize(
    ("numbers", "following"), [([0, 2], 3), ([0, 0], 2), ([1, 0], 2), ([0, 1], 3), ([5, 6], 6)]
)
def test_sequences_that_do_not_rise_by_one_are_corruption(numbers: list[int], following: int) -> None:
    raw = b"".join(entry(number, b"a/b") for number in numbers) + footer(len(numbers), following)
    with pytest.raises(SerializationError):
        m.decode_manifest(raw)


def test_a_location_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(SerializationError, match="UTF-8"):
        m.decode_manifest(entry(0, b"\xff\xfe") + footer(1, 1))


def test_an_entry_shorter_than_its_location_is_refused() -> None:
    body = struct.pack("<QH", 0, 200) + b"abc" + bytes(20)
    with pytest.raises(SerializationError, match="too short"):
        m.decode_manifest(struct.pack("<I", len(body)) + body + footer(1, 1))


def test_dequeue_of_nothing_returns_the_same_bytes() -> None:
    raw = golden("M3.manifest")
    assert m.dequeue(raw, 0) is raw
    assert m.dequeue(golden("M4.manifest"), 1) == golden("M4.manifest")


def test_locate_ignores_a_location_inside_metadata() -> None:
    decoy = NewEntry(
        location="ingest/decoy.batch",
        metadata=[Metadata(start_index=0, ingestion_time_ms=T0, payload=SECOND.encode())],
    )
    raw = m.append(golden("M1.manifest"), [decoy])
    assert m.locate(raw, SECOND) is None
    assert m.locate(raw, "ingest/decoy.batch") == 1
    assert m.locate(raw, FIRST) == 0
    assert m.locate(m.append(raw, [TWO]), SECOND) == 2
    assert m.locate(m.dequeue(raw, 0), FIRST) is None


def test_part_of_a_location_is_not_that_location() -> None:
    assert m.locate(golden("M1.manifest"), FIRST[:-1]) is None
    assert m.locate(golden("M1.manifest"), FIRST[1:]) is None


def test_the_largest_epoch_and_number_survive_every_edit() -> None:
    raw = footer(0, 2**64 - 3, 2**64 - 2)
    grown = m.append(raw, [ONE, TWO])
    assert m.read_footer(grown) == Footer(entry_count=2, next_sequence=2**64 - 1, epoch=2**64 - 2)
    assert m.decode_manifest(m.dequeue(grown, 2**64 - 3)).entries[0].sequence == 2**64 - 2
    assert m.set_epoch(grown, 2**64 - 1)[-10:] == struct.pack("<QH", 2**64 - 1, 1)
    with pytest.raises(SerializationError, match="no number is left"):
        m.append(grown, [ONE])


def test_epochs_skip_the_value_that_means_not_initialised() -> None:
    assert next_epoch(0) == 1
    assert next_epoch(2**64 - 3) == 2**64 - 2
    assert next_epoch(2**64 - 2) == 0
    assert next_epoch(2**64 - 500, 1000) == 501
    assert all(next_epoch(2**64 - 1 - n, 1000) != 2**64 - 1 for n in range(1, 1100))


def test_a_location_longer_than_its_field_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="65535"):
        m.encode_entry(0, NewEntry(location="x" * 65536, metadata=[]))
    assert len(m.encode_entry(0, NewEntry(location="x" * 65535, metadata=[]))) == 4 + 14 + 65535


def test_first_sequence_of_an_empty_queue_is_the_next() -> None:
    assert m.first_sequence(golden("M4.manifest")) == 2
    assert m.first_sequence(golden("M3.manifest")) == 1


def test_entries_after_a_number() -> None:
    found = m.index(golden("M2.manifest"))
    assert [e.sequence for e in found.after(None, 10)] == [0, 1]
    assert [e.sequence for e in found.after(0, 10)] == [1]
    assert [e.sequence for e in found.after(None, 1)] == [0]
    assert found.after(1, 10) == []
    assert found.after(2**64, 10) == []


metas = st.lists(
    st.builds(
        Metadata,
        start_index=st.integers(0, 2**32 - 1),
        ingestion_time_ms=st.integers(-(2**63), 2**63 - 1),
        payload=st.binary(max_size=20),
    ),
    max_size=3,
)
new_entries = st.builds(NewEntry, location=st.text(max_size=20).filter(lambda t: t.isascii()), metadata=metas)


@given(st.lists(st.one_of(st.lists(new_entries, max_size=4), st.integers(0, 30)), max_size=12), st.data())
def test_an_index_grown_over_edits_equals_a_fresh_one(
    edits: list[list[NewEntry] | int], data: st.DataObject
) -> None:
    raw = footer(0, data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2**64 - 1)))
    known = m.index(raw)
    for edit in edits:
        raw = m.dequeue(raw, edit) if isinstance(edit, int) else m.append(raw, edit)
        if data.draw(st.booleans()):
            continue  # several edits between two reads
        grown, fresh = known.grown_into(raw), m.index(raw)
        assert (grown is None) is (fresh.first - known.first > len(known))
        known = grown or fresh
        assert (known.first, known.footer, len(known)) == (fresh.first, fresh.footer, len(fresh))
        assert known.after(None, 1000) == fresh.after(None, 1000)
        assert list(known.locations()) == list(fresh.locations())


@given(st.lists(new_entries, max_size=5), st.integers(0, 2**64 - 1000), st.integers(0, 2**64 - 1))
def test_appended_entries_are_decoded(items: list[NewEntry], first: int, epoch: int) -> None:
    decoded = m.decode_manifest(m.append(footer(0, first, epoch), items))
    assert decoded.footer.epoch == epoch
    assert [e.sequence for e in decoded.entries] == [first + n for n in range(len(items))]
    assert [(e.location, list(e.metadata)) for e in decoded.entries] == [
        (i.location, list(i.metadata)) for i in items
    ]


def test_an_index_does_not_grow_into_another_history() -> None:
    known = m.index(golden("M2.manifest"))
    other = m.append(m.EMPTY_MANIFEST, [TWO, ONE, ONE])
    assert known.grown_into(other) is None
    assert known.grown_into(golden("M1.manifest")) is None
    assert known.grown_into(footer(0, 9)) is None
