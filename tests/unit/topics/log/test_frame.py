"""Log frames: their bytes, the checks before they are built, and the scan that finds them again."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.topics.log_doubles import NOW, TOPIC_ID, encoded, record
from xxhash import xxh3_64_intdigest

from penstock.storage.log_layout import chase
from penstock.topics.errors import BatchTooLarge, InvalidRequest, RecordTooLarge
from penstock.topics.limits import BATCH_RECORDS_MAX, META_BYTES_MAX, RECORD_BYTES_MAX
from penstock.topics.log import frame as frame_module
from penstock.topics.log.frame import DURABLE, MORE, FrameType, encode, encode_control
from penstock.topics.log.frame_scan import WalFormat, read_frames
from penstock.topics.log.payload import ESCAPED, prepare
from penstock.topics.model import BareRecord, NewRecord
from penstock.topics.segments.format import IDX_DTYPE

WAL = WalFormat()


def raw(text: str, **fields: str) -> NewRecord:
    return NewRecord(data=msgspec.Raw(text.encode()), **fields)


def frame_by_hand(seq: int, flags: int, node: bytes, tag: bytes, payload: bytes) -> bytes:
    body = struct.pack("<BBQQQHHI", 1, flags, TOPIC_ID, seq, NOW, len(node), len(tag), len(payload))
    body += node + tag + payload
    return struct.pack("<I", len(body) + 8) + body + struct.pack("<Q", xxh3_64_intdigest(body))


def found(buffer: bytes) -> list[memoryview]:
    view = memoryview(buffer)
    ends, stopped = WAL.frame_ends(view, 0, len(view))
    assert stopped == (ends[-1] if len(ends) else 0)
    return [view[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def test_a_write_becomes_the_frames_of_the_format() -> None:
    batch = encoded([record(1), record({"a": "b"}, tag="t", meta={"k": 1})], first_seq=5, node="n")
    first = frame_by_hand(5, 2 | DURABLE | MORE, b"n", b"", b'{"d":1}')
    second = frame_by_hand(6, 1 | 2 | 8 | DURABLE, b"n", b"t", b'{"d":{"a":"b"},"m":{"k":1}}')
    assert bytes(batch.buffer) == first + second
    assert batch.tags == [(1, b"t")]
    assert batch.accounted_bytes == 1 + len('{"a":"b"}') + len('{"k":1}')
    rows = np.frombuffer(batch.rows, IDX_DTYPE)
    assert rows["offset"].tolist() == [0, len(first)]
    assert rows["length"].tolist() == [len(first), len(second)]
    assert rows["flags"].tolist() == [2, 1 | 2 | 8]
    assert (rows["length"] - (rows["packed"] >> 8)).tolist() == [1, 16]


texts = st.text('ab \\"/\u00e9\u20ac\U0001f600\n,:{}[]', max_size=12)
new_records = st.builds(
    record,
    st.none() | st.integers() | texts | st.dictionaries(texts, texts, max_size=2),
    tag=st.none() | texts,
    node=st.none() | texts,
    meta=st.none() | st.dictionaries(texts, texts, max_size=2),
)


@settings(max_examples=150)
@given(
    st.lists(new_records, min_size=1, max_size=6) | st.lists(st.builds(record, texts), min_size=1, max_size=6)
)
def test_many_records_are_encoded_as_few_are(records: list[NewRecord]) -> None:
    batch = prepare(records, "origin")
    for ends in ((batch.count,), (1, batch.count), range(1, batch.count + 1)):
        head = frame_module._Head(3, 9, 17, DURABLE, ends)
        few, many = frame_module._encode_few(batch, head), frame_module._encode_many(batch, head)
        assert bytes(few[0]) == bytes(many[0])
        assert few[1] == many[1]
    large = prepare(records * 30, "origin", parsed=True)
    assert large.accounted == batch.accounted * 30


@settings(max_examples=150)
@given(st.lists(new_records, min_size=1, max_size=40))
def test_a_scan_of_the_log_finds_what_was_written(records: list[NewRecord]) -> None:
    batch = encoded(records, first_seq=3)
    buffer = bytes(batch.buffer)
    view = memoryview(b"\xee" * 5 + buffer + bytes(50))
    ends, stopped = WAL.frame_ends(view, 5, len(view))
    table = read_frames(view, 5, ends)
    assert stopped == 5 + len(buffer)
    assert table.heads["seq"].tolist() == list(range(3, 3 + len(records)))
    assert table.heads["flags"][-1] & MORE == 0
    assert (table.heads["flags"][:-1] & MORE != 0).all()
    assert list(table.tags()) == batch.tags
    rows = np.frombuffer(table.index_rows(), IDX_DTYPE).copy()
    rows["offset"] -= 5
    assert rows.tobytes() == batch.rows
    for place, written in enumerate(records):
        body = json.loads(bytes(table.body(place)))
        assert body["d"] == json.loads(bytes(written.data))


def size_as_a_serialiser_writes_it(text: bytes) -> int:
    return len(json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")).encode())


@settings(max_examples=300)
@given(
    st.lists(st.text(max_size=8) | st.text('\\"/\u0001\n\u007f\u00e9\U0001f600u0041', max_size=8), max_size=4)
)
def test_escapes_are_accounted_as_a_serialiser_writes_them(values: Sequence[str]) -> None:
    text = json.dumps(values, ensure_ascii=True).replace("/", "\\/").encode()
    want = size_as_a_serialiser_writes_it(text)
    new = NewRecord(data=msgspec.Raw(text))
    assert prepare([new]).accounted == [want]
    assert prepare([new, raw("1"), new] * 10, parsed=True).accounted == [want, 1, want] * 10
    stored = prepare([new]).data[0]
    assert json.loads(bytes(stored)) == list(values)


def test_escaped_records_are_flagged_so_that_replay_can_skip_the_others() -> None:
    batch = encoded([raw('"\\u0041"'), raw('"\\n"'), raw("1")])
    flags = [frame[5] & ESCAPED for frame in found(bytes(batch.buffer))]
    assert flags == [ESCAPED, 0, 0]
    assert batch.accounted_bytes == 3 + 4 + 1


@pytest.mark.parametrize("count", [1, 3, 40])
def test_blanks_between_tokens_are_not_stored_and_those_in_strings_are(count: int) -> None:
    text = '{ "a b" : [ 1 ,\n2\t] , "c, d": "{ x }" }'
    tight = '{"a b":[1,2],"c, d":"{ x }"}'
    for parsed in (False, True):
        batch = prepare([raw(text)] * count, parsed=parsed)
        assert [bytes(data) for data in batch.data] == [tight.encode()] * count
        assert batch.accounted == [len(tight)] * count


@pytest.mark.parametrize("text", ['"hello, world: {x} [y]"', '["a ,b"," "]', '"a b"', '{"k":"v w"}'])
def test_text_that_is_compact_is_kept_as_it_is(text: str) -> None:
    assert [bytes(data) for data in prepare([raw(text)] * 40, parsed=True).data] == [text.encode()] * 40


@pytest.mark.parametrize("text", ["", "1,2", "1],[2", "{", "nul", '"\\ud800"', "[1,]", "1 2"])
def test_data_that_is_not_a_json_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"records\[1\].data is not JSON"):
        prepare([raw("1"), raw(text)])


def test_data_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"records\[0\].data"):
        prepare([NewRecord(data=msgspec.Raw(b'"\xff"'))])


def test_a_write_without_records_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        prepare([])


def test_too_many_records_are_refused_before_anything_else() -> None:
    with pytest.raises(BatchTooLarge) as caught:
        prepare([raw("{")] * (BATCH_RECORDS_MAX + 1))
    assert caught.value.detail == {"records": BATCH_RECORDS_MAX + 1, "max": BATCH_RECORDS_MAX}


@pytest.mark.parametrize("count", [1, 30])
def test_a_record_of_exactly_the_limit_is_allowed_and_one_byte_more_is_not(count: int) -> None:
    largest = raw('"' + "x" * (RECORD_BYTES_MAX - 2) + '"')
    assert prepare([largest] * count, parsed=True).accounted[-1] == RECORD_BYTES_MAX
    with pytest.raises(RecordTooLarge, match=r"records\[1\]"):
        prepare([raw("1"), raw('"' + "x" * (RECORD_BYTES_MAX - 1) + '"')], parsed=True)
    with pytest.raises(RecordTooLarge):
        prepare([raw('"' + "x" * (RECORD_BYTES_MAX - 1) + '"')], parsed=True)


def test_meta_counts_towards_the_limit_of_a_record() -> None:
    data = "x" * (RECORD_BYTES_MAX - 2 - 2)
    assert prepare([record(data, meta={})]).accounted == [RECORD_BYTES_MAX]
    with pytest.raises(RecordTooLarge):
        prepare([record(data + "x", meta={})])


@pytest.mark.parametrize("name", ["tag", "node"])
def test_names_are_measured_in_bytes(name: str) -> None:
    limit = {"tag": 256, "node": 128}[name]
    assert prepare([raw("1", **{name: "\u00e9" * (limit // 2)})]).count == 1
    with pytest.raises(InvalidRequest, match=rf"records\[0\].{name} has {limit + 1} bytes"):
        prepare([raw("1", **{name: "x" * (limit + 1)})])
    with pytest.raises(InvalidRequest, match="surrogate"):
        prepare([raw("1", **{name: "\ud800"})])


def test_the_origin_of_a_whole_write_is_checked_as_well() -> None:
    with pytest.raises(InvalidRequest, match="node has 129 bytes"):
        prepare([raw("1")], "x" * 129)


def test_meta_is_limited_in_bytes_and_in_keys() -> None:
    assert prepare([record(1, meta={f"k{i}": {":": ":"} for i in range(64)})]).count == 1
    with pytest.raises(InvalidRequest, match="65 keys"):
        prepare([record(1, meta={f"k{i}": 0 for i in range(65)})])
    assert prepare([record(1, meta={"k": "x" * (META_BYTES_MAX - 8)})]).accounted == [META_BYTES_MAX + 1]
    with pytest.raises(InvalidRequest, match=r"records\[0\].meta has"):
        prepare([record(1, meta={"k": "x" * (META_BYTES_MAX - 7)})])


def test_null_meta_is_equal_to_no_meta() -> None:
    for records in ([NewRecord(data=msgspec.Raw(b"1"), meta=msgspec.Raw(b" null "))],):
        assert bytes(encoded(records).buffer) == bytes(encoded([raw("1")]).buffer)


def test_an_empty_tag_is_a_tag() -> None:
    batch = encoded([record(1, tag="", node="")])
    assert batch.tags == [(0, b"")]
    assert batch.buffer[5] & 3 == 3


def test_a_control_frame_is_valid() -> None:
    made = encode_control(FrameType.DELETE, 4, b"body", seq=8, ts_ms=9)
    assert WAL.frame_end(memoryview(made), 0, len(made)) == len(made)
    table = read_frames(memoryview(made), 0, np.array([len(made)]))
    assert bytes(table.body(0)) == b"body"
    assert table.heads[0]["topic_id"] == 4


def test_marks_have_one_length_and_one_beginning() -> None:
    marks = [WAL.mark(value) for value in (0, 7, 2**64 - 1)]
    assert [WAL.read_mark(memoryview(mark)) for mark in marks] == [0, 7, 2**64 - 1]
    assert len({len(mark) for mark in marks}) == len({mark[:38] for mark in marks}) == 1
    assert WAL.read_mark(memoryview(bytes(encoded([record(1)]).buffer))) is None


def test_a_scan_ends_at_any_wrong_bytes() -> None:
    good = bytes(encoded([record(n) for n in range(5)]).buffer)
    frames = found(good)
    third = len(frames[0]) + len(frames[1])
    for at in range(third, third + len(frames[2])):
        bad = bytearray(good)
        bad[at] ^= 1
        ends, stopped = WAL.frame_ends(memoryview(bad), 0, len(bad))
        assert (len(ends), stopped) == (2, third)
        assert chase(WAL, memoryview(bad), 0, len(bad))[1] == third


@pytest.mark.parametrize("kind", [0, 13, 255])
def test_a_frame_of_an_unknown_type_is_invalid(kind: int) -> None:
    body = struct.pack("<BBQQQHHI", kind, 0, 0, 0, 0, 0, 0, 0)
    made = struct.pack("<I", len(body) + 8) + body + struct.pack("<Q", xxh3_64_intdigest(body))
    assert WAL.frame_end(memoryview(made), 0, len(made)) is None
    assert WAL.frame_ends(memoryview(made), 0, len(made))[1] == 0


def test_a_torn_tail_ends_the_scan() -> None:
    good = bytes(encoded([record(n) for n in range(3)]).buffer)
    for size in range(len(good)):
        ends, stopped = WAL.frame_ends(memoryview(good), 0, size)
        assert stopped <= size
        assert len(ends) < 3
        assert chase(WAL, memoryview(good), 0, size)[1] == stopped


def test_a_scan_continues_after_one_chunk() -> None:
    large = encoded([record("x" * 900_000) for _ in range(12)])
    assert len(found(bytes(large.buffer))) == 12
    huge = encode_control(FrameType.DELETE, 1, bytes(5 * 1024**2))
    assert len(found(huge + huge)) == 2


def test_every_frame_of_a_write_has_the_same_time_and_topic() -> None:
    batch = encode(prepare([record(n) for n in range(50)]), topic_id=9, first_seq=4, ts_ms=77, durable=False)
    view = memoryview(bytes(batch.buffer))
    ends, _ = WAL.frame_ends(view, 0, len(view))
    heads = read_frames(view, 0, ends).heads
    assert set(heads["ts"].tolist()) == {77}
    assert set(heads["topic_id"].tolist()) == {9}
    assert not (heads["flags"] & DURABLE).any()


@settings(max_examples=100)
@given(st.lists(texts, min_size=1, max_size=40))
def test_bare_records_are_prepared_like_other_records_with_only_data(values: list[str]) -> None:
    for escaped in (False, True):
        data = [msgspec.Raw(json.dumps(value, ensure_ascii=escaped).encode()) for value in values]
        bare = prepare([BareRecord(text) for text in data], "origin", parsed=True)
        new = prepare([NewRecord(text) for text in data], "origin", parsed=True)
        assert list(map(bytes, bare.data)) == list(map(bytes, new.data))
        assert (bare.accounted, bare.headers, bare.tags) == (new.accounted, new.headers, new.tags)


@pytest.mark.parametrize("count", [4, 4000])
@pytest.mark.parametrize("text", ['"a | b \\\\ c"', '{"k":"v w"}', '["hello, world"]', '"y Y _ z"'])
def test_compact_text_of_any_size_is_kept(count: int, text: str) -> None:
    batch = prepare([raw(text)] * count, parsed=True)
    assert {bytes(data) for data in batch.data} == {text.encode()}
    loose = [raw(text)] * (count - 1) + [raw(f" [{text} ,1]")]
    assert bytes(prepare(loose, parsed=True).data[-1]) == f"[{text},1]".encode()


def test_a_large_batch_has_the_frames_of_a_small_one() -> None:
    records = [raw(json.dumps({"n": n, "text": "x y" * (n % 7)}, separators=(",", ":"))) for n in range(3000)]
    batch = prepare(records, parsed=True)
    head = frame_module._Head(2**63, 2**40 - 7, 2**41, DURABLE, (batch.count,))
    few = frame_module._encode_few(batch, head)
    many = frame_module._encode_many(batch, head)
    assert (bytes(few[0]), few[1]) == (bytes(many[0]), many[1])


def test_bare_and_full_records_may_be_mixed() -> None:
    records = [BareRecord(msgspec.Raw(b"1")), raw("2", tag="t"), BareRecord(msgspec.Raw(b"3"))]
    assert prepare(records).tags == [(1, b"t")]
