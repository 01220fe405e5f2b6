from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.buffer.doubles import golden

from penstock.buffer import InvalidInputError, SerializationError
from penstock.buffer import manifest as m
from penstock.buffer.manifest import Metadata, NewEntry
from penstock.buffer.transactions import (
    APP_BYTES_MAX,
    TRANSACTION_LOG_APPS,
    VERSION_MAX,
    Transaction,
    encode_tag,
    find_tag,
    merge_versions,
    newest_version,
    read_transaction_log,
    tags,
    write_transaction_log,
)

apps = st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable())
transactions = st.builds(Transaction, app=apps, version=st.integers(0, VERSION_MAX))


def tag(app: str, version: int) -> bytes:
    return encode_tag(Transaction(app=app, version=version))


def queue(*tails: bytes, first: int = 0, payload: bytes = b"") -> bytes:
    raw = m.Footer(entry_count=0, next_sequence=first, epoch=1).pack()
    metadata = (Metadata(start_index=0, ingestion_time_ms=1_700_000_000_000, payload=payload),)
    entries = [
        NewEntry(location=f"ingest/{n}.batch", metadata=metadata, tail=tail) for n, tail in enumerate(tails)
    ]
    return m.append(raw, entries)


def test_the_golden_tag_is_written_and_read() -> None:
    raw = queue(tag("query", 7), b"", tag("zwölf", VERSION_MAX))
    assert raw == golden("tagged.manifest")
    assert find_tag(m.decode_manifest(raw).entries[0].tail) == Transaction(app="query", version=7)


def test_the_golden_transaction_log_is_written_and_read() -> None:
    book = {"query": 7, "zwölf": VERSION_MAX}
    assert write_transaction_log(book) == golden("v1.txn")
    assert read_transaction_log(golden("v1.txn")) == book


@given(transactions, st.binary(max_size=20), st.binary(max_size=20))
def test_a_tag_is_found_among_other_bytes(given_: Transaction, before: bytes, behind: bytes) -> None:
    if b"P" not in before:
        assert find_tag(before + encode_tag(given_) + behind) == given_


def test_a_tag_is_found_after_a_checksum() -> None:
    checksum = struct.pack("<III", 0x12345678, 0x1234, 99)
    assert find_tag(checksum + tag("query", 7)) == Transaction(app="query", version=7)
    assert find_tag(tag("query", 7) + checksum) == Transaction(app="query", version=7)
    assert find_tag(b"PTX1" + tag("query", 7)) == Transaction(app="query", version=7)


@given(st.binary(max_size=60))
def test_random_bytes_neither_form_a_tag_nor_break_the_search(tail: bytes) -> None:
    if b"PTX1" not in tail:
        assert find_tag(tail) is None
    find_tag(b"PTX1" + tail)


@pytest.mark.parametrize("cut", range(1, len(tag("query", 7))))
def test_a_truncated_tag_is_ignored(cut: int) -> None:
    assert find_tag(tag("query", 7)[:-cut]) is None


@pytest.mark.parametrize(
    ("app", "version"),
    [
        pytest.param("", 0, id="empty-app"),
        pytest.param("x" * (APP_BYTES_MAX + 1), 0, id="long-app"),
        pytest.param("ö" * (APP_BYTES_MAX // 2 + 1), 0, id="long-in-bytes"),
        pytest.param("\ud800", 0, id="not-utf8"),
        pytest.param(b"query", 0, id="bytes"),
        pytest.param("query", -1, id="negative"),
        pytest.param("query", VERSION_MAX + 1, id="large"),
        pytest.param("query", True, id="flag"),
        pytest.param("query", 1.0, id="float"),
    ],
)
def test_a_transaction_outside_its_limits_is_refused(app: object, version: object) -> None:
    with pytest.raises(InvalidInputError):
        Transaction(app=app, version=version)  # type: ignore[arg-type]


def test_the_newest_version_of_an_application_is_found_among_the_entries() -> None:
    raw = queue(tag("a", 1), tag("b", 9), tag("a", 2), b"", tag("ab", 5), tag("b", 10))
    assert [newest_version(raw, app) for app in ("a", "b", "ab", "c")] == [2, 10, 5, None]
    assert newest_version(m.EMPTY_MANIFEST, "a") is None


def test_a_tag_inside_metadata_is_ignored() -> None:
    raw = queue(b"", tag("a", 1), b"", payload=b"my copy: " + tag("a", 99) + tag("b", 1))
    assert newest_version(raw, "a") == 1
    assert newest_version(raw, "b") is None
    assert tags(raw, 2) == {"a": 1}


def test_the_tags_of_a_dequeue_are_those_up_to_its_last_entry() -> None:
    raw = queue(tag("a", 1), tag("b", 9), tag("a", 2), b"", tag("c", 5), first=10)
    assert tags(raw, 9) == {}
    assert tags(raw, 11) == {"b": 9, "a": 1}
    assert tags(raw, 13) == {"a": 2, "b": 9}
    assert tags(raw, 99) == {"c": 5, "a": 2, "b": 9}


def test_a_tag_survives_every_edit() -> None:
    raw = m.set_epoch(m.append(m.dequeue(queue(b"", tag("a", 1)), 0), []), 7)
    assert newest_version(raw, "a") == 1
    assert [tail for _, tail in m.tails(raw, b"PTX1")] == [tag("a", 1)]


@given(
    st.lists(st.one_of(st.just(b""), transactions.map(encode_tag), st.binary(max_size=30)), max_size=8),
    st.integers(-1, 10),
)
def test_the_search_agrees_with_full_decoding(tails: list[bytes], through: int) -> None:
    raw = queue(*tails)
    expected: dict[str, int] = {}
    for number, tail in enumerate(tails):
        found = find_tag(tail)
        if found is not None and number <= through:
            expected[found.app] = max(found.version, expected.get(found.app, 0))
    assert tags(raw, through) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b'{"version":2,"last":[]}',
        b'{"version":1,"last":[["a",1],["a",2]]}',
        b'{"version":1,"last":[["",1]]}',
        b'{"version":1,"last":[["a",-1]]}',
        b'{"version":1,"last":[["a",1]],"more":1}',
        b'{"version":1,"last":[["\xff",1]]}',
    ],
    ids=["empty", "fields", "version", "twice", "no-app", "negative", "unknown", "utf8"],
)
def test_a_damaged_transaction_log_is_not_treated_as_empty(raw: bytes) -> None:
    with pytest.raises(SerializationError):
        read_transaction_log(raw)


@given(st.dictionaries(apps, st.integers(0, VERSION_MAX)), st.dictionaries(apps, st.integers(0, VERSION_MAX)))
def test_entering_keeps_the_greater_of_both(book: dict[str, int], versions: dict[str, int]) -> None:
    merged = merge_versions(book, versions)
    expected = {app: max(book.get(app, -1), versions.get(app, -1)) for app in {*book, *versions}}
    assert (book if merged is None else merged) == expected
    assert read_transaction_log(write_transaction_log(expected)) == expected


def test_a_full_log_drops_the_oldest_application() -> None:
    book = {f"app {n}": n for n in range(TRANSACTION_LOG_APPS)}
    book = merge_versions(book, {"app 0": 5}) or {}
    book = merge_versions(book, {"new": 1}) or {}
    assert len(book) == TRANSACTION_LOG_APPS
    assert "app 1" not in book
    assert book["app 0"] == 5
    assert list(book)[-2:] == ["app 0", "new"]
