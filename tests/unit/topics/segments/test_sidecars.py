"""The sidecars of a segment: its deletions and its tags."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.topics.segments.segment_doubles import Written, built_of, some_records

from penstock.topics.errors import Damaged
from penstock.topics.segments.format import (
    HAS_TAG,
    IDX_DTYPE,
    IndexRows,
    close_sidecar,
    decode_deleted,
    encode_deleted,
    open_sidecar,
)
from penstock.topics.segments.tags import TagTable, decode_tags, tags_of_frames


def bits(text: str) -> np.ndarray:
    return np.array([letter == "x" for letter in text], np.bool_)


def tagged(text: str) -> IndexRows:
    rows = np.zeros(len(text), IDX_DTYPE)
    rows["flags"] = [HAS_TAG if letter == "t" else 0 for letter in text]
    return rows


def flips(raw: bytes) -> list[bytes]:
    found = []
    for bit in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        found.append(bytes(changed))
    return found


@given(st.lists(st.booleans(), max_size=70), st.integers(0, 2**64 - 1))
def test_deletions_read_back_as_they_were(deleted: list[bool], first_seq: int) -> None:
    raw = encode_deleted(first_seq, np.array(deleted, np.bool_))
    assert decode_deleted(raw, first_seq, len(deleted)).tolist() == deleted


def test_records_added_after_the_file_are_not_deleted() -> None:
    raw = encode_deleted(5, bits("x.x"))
    assert decode_deleted(raw, 5, 6).tolist() == bits("x.x...").tolist()


def test_records_beyond_the_segments_count_are_omitted() -> None:
    assert decode_deleted(encode_deleted(5, bits("..xxx")), 5, 3).tolist() == bits("..x").tolist()


def test_any_flipped_bit_in_a_del_file_is_damage() -> None:
    for raw in flips(encode_deleted(5, bits("x..x....x"))):
        with pytest.raises(Damaged):
            decode_deleted(raw, 5, 9)


def test_a_file_of_another_segment_or_kind_or_version_is_damage() -> None:
    raw = encode_deleted(5, bits("x."))
    with pytest.raises(Damaged, match="belongs to something else"):
        decode_deleted(raw, 6, 2)
    with pytest.raises(Damaged, match="belongs to something else"):
        decode_tags(raw, 5, tagged(".."))
    with pytest.raises(Damaged, match="do not fit"):
        decode_deleted(close_sidecar(b"PTD1", 5, 9, b"\0"), 5, 9)


@given(st.binary(max_size=60))
def test_foreign_bytes_beside_a_segment_are_damage(raw: bytes) -> None:
    with pytest.raises(Damaged):
        open_sidecar(raw, b"PTD1", 1)
    with pytest.raises(Damaged):
        decode_tags(close_sidecar(b"PTT1", 1, 3, raw), 1, tagged("t.t"))


def test_a_truncated_file_is_damage() -> None:
    raw = TagTable.of(1, {"a": [0]}).encoded(1)
    for size in range(len(raw)):
        with pytest.raises(Damaged):
            decode_tags(raw[:size], 1, tagged("t"))


def test_a_tag_leads_to_its_records_and_a_prefix_to_all_of_its_tags() -> None:
    table = TagTable.of(100, {"b": [1], "ab": [0, 4], "a": [2], "a€": [3, 5]})
    assert table.seqs("ab").tolist() == [100, 104]
    assert table.seqs("aa").tolist() == []
    assert table.seqs("z").tolist() == []
    assert [(tag, seqs.tolist()) for tag, seqs in table.with_prefix("a")] == [
        ("a", [102]),
        ("ab", [100, 104]),
        ("a€", [103, 105]),
    ]
    assert list(table.with_prefix("c")) == []
    assert (len(table), table.records, list(table.tags)) == (4, 6, ["a", "ab", "a€", "b"])


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=30))
def test_tags_read_back_as_they_were(tags: list[str | None]) -> None:
    by_tag: dict[str, list[int]] = {}
    for place, tag in enumerate(tags):
        if tag is not None:
            by_tag.setdefault(tag, []).append(place)
    raw = TagTable.of(7, by_tag).encoded(len(tags))
    rows = tagged("".join("t" if tag is not None else "." for tag in tags))
    table = decode_tags(raw, 7, rows)
    assert {tag: (table.seqs(tag) - np.uint64(7)).tolist() for tag in table.tags} == by_tag


def test_any_flipped_bit_in_a_tags_file_is_damage() -> None:
    for raw in flips(TagTable.of(5, {"a": [0, 2], "bc": [3]}).encoded(4)):
        with pytest.raises(Damaged):
            decode_tags(raw, 5, tagged("t.tt"))


@pytest.mark.parametrize("rows", ["t.t", "t.t.", "tttt", "....", "t.ttt"])
def test_a_table_that_does_not_cover_exactly_the_tagged_records_is_damage(rows: str) -> None:
    with pytest.raises(Damaged, match="do not match the records"):
        decode_tags(TagTable.of(5, {"a": [0, 2], "bc": [3]}).encoded(4), 5, tagged(rows))


def test_the_records_and_the_table_have_the_same_tags() -> None:
    records = some_records(20)
    built = built_of(records, first_seq=31)
    table = tags_of_frames(b"".join(built.data), built.rows, 31)
    for tag in ("tag-0", "tag-1", "tag-2"):
        expected = [31 + i for i, record in enumerate(records) if record.tag == tag.encode()]
        assert table.seqs(tag).tolist() == expected
    assert table.records == sum(1 for record in records if record.tag)
    assert decode_tags(table.encoded(20), 31, built.rows).tags == table.tags


def test_a_tag_that_is_not_text_is_damage() -> None:
    built = built_of([Written(b'{"d":1}', tag=b"\xff")])
    with pytest.raises(Damaged, match="is not text"):
        tags_of_frames(b"".join(built.data), built.rows, 1)
