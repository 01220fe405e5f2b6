from __future__ import annotations

import pytest

from penstock.cli.topics import write
from penstock.cli.topics.write import Batch, Batcher
from penstock.errors import InvalidInput


def data_of(batches: list[Batch]) -> list[list[bytes]]:
    return [[bytes(record.data) for record in batch.records] for batch in batches]


def test_lines_become_batches_by_count() -> None:
    batcher = Batcher(records_max=2, envelope=False)
    full = list(batcher.add([b"1", b"[2]", b'{"a": 3}']))
    assert data_of(full) == [[b"1", b"[2]"]]
    (rest,) = batcher.flush()
    assert (data_of([rest]), rest.first_line) == ([[b'{"a": 3}']], 3)
    assert list(batcher.flush()) == []


def test_lines_become_batches_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "BATCH_BYTES", 10)
    batcher = Batcher(records_max=100, envelope=False)
    full = [*batcher.add([b"12345", b"12345", b"1", b"123456789012345", b"2"]), *batcher.flush()]
    assert [[len(text) for text in batch] for batch in data_of(full)] == [[5, 5], [1], [15], [1]]
    assert [batch.first_line for batch in full] == [1, 3, 4, 5]


def test_blank_lines_are_skipped_but_counted() -> None:
    batcher = Batcher(records_max=10, envelope=False)
    list(batcher.add([b"", b"  ", b"7"]))
    assert next(batcher.flush()).first_line == 3


@pytest.mark.parametrize("bad", [b"{", b"1 2", b"nope", b'"\xff"', b'{"a":1}}'])
def test_a_bad_line_is_named_after_the_good_ones_before_it(bad: bytes) -> None:
    batcher = Batcher(records_max=10, envelope=False)
    taken: list[Batch] = []
    with pytest.raises(InvalidInput, match="line 3 of the input"):
        taken.extend(batcher.add([b"1", b"2", bad, b"4"]))
    assert batcher.next_line == 3


def test_the_good_lines_before_a_bad_one_come_first() -> None:
    stream = Batcher(records_max=10, envelope=False).add([b"1", b"2", b"{"])
    assert data_of([next(stream)]) == [[b"1", b"2"]]
    with pytest.raises(InvalidInput):
        next(stream)


@pytest.mark.parametrize(
    ("line", "tag", "node", "meta"),
    [
        (b'{"data":1}', None, None, None),
        (b'{"data":1,"tag":"t","node":"n","meta":{"k":1}}', "t", "n", b'{"k":1}'),
        (b'{"$seq":1,"$ts":2,"$tag":"t","$node":"n","data":1,"meta": null }', "t", "n", None),
    ],
)
def test_an_envelope_is_what_diff_prints(
    line: bytes, tag: str | None, node: str | None, meta: bytes | None
) -> None:
    batcher = Batcher(records_max=1, envelope=True)
    ((record,),) = [batch.records for batch in batcher.add([line])]
    assert (bytes(record.data), record.tag, record.node) == (b"1", tag, node)
    assert (None if record.meta is None else bytes(record.meta)) == meta


GAP = b'{"tombstone":{"gap_from":1,"gap_to":3,"reason":"cap","earliest_seq":4,"head_seq":5}}'


def test_a_tombstone_among_envelopes_is_reported_and_skipped() -> None:
    told: list[tuple[int, str]] = []
    batcher = Batcher(records_max=9, envelope=True, on_gap=lambda line, gone: told.append((line, gone)))
    (batch,) = [*batcher.add([GAP, b'{"data":4}', b'{"data":{"tombstone":5}}']), *batcher.flush()]
    assert data_of([batch]) == [[b"4", b'{"tombstone":5}']]
    assert batch.first_line == 2
    assert told == [(1, "records 1 to 3, which are gone (cap)")]


def test_a_recreated_topic_is_reported_as_such() -> None:
    told: list[str] = []
    batcher = Batcher(records_max=9, envelope=True, on_gap=lambda _, gone: told.append(gone))
    line = GAP.replace(b'"cap"', b'"recreated"')
    assert [*batcher.add([line]), *batcher.flush()] == []
    assert told == ["records that are gone (recreated)"]


def test_without_envelopes_a_tombstone_is_ordinary_data() -> None:
    (batch,) = Batcher(records_max=1, envelope=False).add([GAP])
    assert data_of([batch]) == [[GAP]]


def test_an_envelope_may_contain_a_tombstone_field() -> None:
    (batch,) = Batcher(records_max=1, envelope=True).add([b'{"data":1,"tombstone":{}}'])
    assert data_of([batch]) == [[b"1"]]


@pytest.mark.parametrize(
    "line", [b"1", b"{}", b'{"tombstone":1}', b'{"tombstone":\xff}', b'{"data":1,"tag":2}']
)
def test_an_envelope_needs_data(line: bytes) -> None:
    with pytest.raises(InvalidInput, match="an object with data"):
        list(Batcher(records_max=1, envelope=True).add([line]))
