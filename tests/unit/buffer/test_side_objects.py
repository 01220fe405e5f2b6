from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.buffer.doubles import golden

from penstock.buffer import SerializationError, side_objects
from penstock.buffer import manifest as m
from penstock.buffer.append import AppendOutcome, Attempt, resolve_attempt, resolve_by_dequeued_log
from penstock.buffer.manifest import NewEntry
from penstock.buffer.side_objects import (
    DEQUEUED_LOG_ENTRIES,
    NO_FLOOR,
    DequeuedLog,
    Floor,
    encode_dequeued_log,
    read_dequeued_log,
    read_floor,
    write_floor,
)
from penstock.objects import Version

BASE, OTHER = Version(etag='"1"'), Version(etag='"2"')


def manifest_of(*locations: str, first: int = 0) -> bytes:
    raw = m.Footer(entry_count=0, next_sequence=first, epoch=1).pack()
    return m.append(raw, [NewEntry(location=location, metadata=[]) for location in locations])


def mine(first: int, *locations: str) -> Attempt:
    return Attempt(base=BASE, first=first, locations=locations)


@pytest.mark.parametrize(
    ("attempt", "raw", "version", "outcome"),
    [
        pytest.param(mine(1, "me"), manifest_of("a", "me"), OTHER, AppendOutcome.LANDED, id="present"),
        pytest.param(
            mine(1, "me"), manifest_of("me", "b", first=1), OTHER, AppendOutcome.LANDED, id="present, first"
        ),
        pytest.param(mine(1, "me"), manifest_of("a"), BASE, AppendOutcome.OPEN, id="absent, base unchanged"),
        pytest.param(mine(1, "me"), manifest_of("a"), OTHER, AppendOutcome.LOST, id="absent, base changed"),
        pytest.param(
            mine(1, "me"), manifest_of(first=1), OTHER, AppendOutcome.LOST, id="absent, all dequeued"
        ),
        pytest.param(
            mine(1, "me"), manifest_of("a", "b"), OTHER, AppendOutcome.LOST, id="number taken by another"
        ),
        pytest.param(
            mine(1, "me"), manifest_of("c", first=2), OTHER, AppendOutcome.DEQUEUED, id="number gone"
        ),
        pytest.param(
            mine(1, "me"), manifest_of(first=2), OTHER, AppendOutcome.DEQUEUED, id="number gone, empty"
        ),
        pytest.param(
            mine(1, "me", "too"),
            manifest_of("too", first=2),
            OTHER,
            AppendOutcome.LANDED,
            id="group half dequeued",
        ),
        pytest.param(
            mine(1, "me", "too"), manifest_of("x", first=2), OTHER, AppendOutcome.LOST, id="group lost"
        ),
        pytest.param(
            mine(1, "me", "too"),
            manifest_of("a", "b"),
            OTHER,
            AppendOutcome.LOST,
            id="group only partly overtaken",
        ),
        pytest.param(
            mine(1, "me", "too"), manifest_of(first=3), OTHER, AppendOutcome.DEQUEUED, id="group gone"
        ),
        pytest.param(
            Attempt(base=None, first=0, locations=("me",)),
            m.EMPTY_MANIFEST,
            None,
            AppendOutcome.OPEN,
            id="still absent",
        ),
        pytest.param(
            Attempt(base=None, first=0, locations=("me",)),
            m.EMPTY_MANIFEST,
            BASE,
            AppendOutcome.LOST,
            id="created since",
        ),
    ],
)
def test_the_outcome_of_an_attempt(
    attempt: Attempt, raw: bytes, version: Version | None, outcome: AppendOutcome
) -> None:
    assert resolve_attempt(attempt, raw, version) is outcome


@pytest.mark.parametrize(
    ("ledger", "outcome"),
    [
        ({5: "me", 6: "too"}, AppendOutcome.LANDED),
        ({6: "too"}, AppendOutcome.LANDED),
        ({5: "me", 6: "other"}, AppendOutcome.LOST),
        ({5: "me"}, AppendOutcome.DEQUEUED),
        ({7: "later"}, AppendOutcome.DEQUEUED),
        ({}, AppendOutcome.DEQUEUED),
    ],
)
def test_the_ledger_settles_dequeued_attempts(ledger: dict[int, str], outcome: AppendOutcome) -> None:
    assert resolve_by_dequeued_log(mine(5, "me", "too"), ledger) is outcome


def test_the_golden_ledger_is_read_and_written() -> None:
    known = read_dequeued_log(golden("M4.ledger"))
    assert known == {0: known[0], 1: "ingest/01HF7YATS00000000000000002.batch"}
    assert encode_dequeued_log({}, sorted(known.items()), epoch=1) == (golden("M4.ledger"), known)
    assert encode_dequeued_log({0: known[0]}, [(1, known[1])], epoch=1) == (golden("M4.ledger"), known)


def test_the_ledger_drops_the_oldest_entries_first() -> None:
    removed = [(n, f"x/{n}") for n in range(10, 10 + DEQUEUED_LOG_ENTRIES + 5)]
    raw, known = encode_dequeued_log({9: "x/9"}, removed, epoch=3)
    assert read_dequeued_log(raw) == known
    assert (min(known), max(known), len(known)) == (15, DEQUEUED_LOG_ENTRIES + 14, DEQUEUED_LOG_ENTRIES)
    assert m.read_footer(raw).epoch == 3


def test_the_ledger_drops_entries_before_a_gap() -> None:
    raw, known = encode_dequeued_log({1: "a", 2: "b"}, [(5, "e"), (6, "f")], epoch=1)
    assert known == read_dequeued_log(raw) == {5: "e", 6: "f"}


def test_an_empty_ledger_can_be_written() -> None:
    raw, known = encode_dequeued_log({}, [], epoch=1)
    assert known == read_dequeued_log(raw) == {}


@given(st.lists(st.integers(1, 10), max_size=20))
def test_the_ledger_keeps_every_run_without_gaps(runs: list[int]) -> None:
    known: dict[int, str] = {}
    following = 0
    for length in runs:
        raw, known = encode_dequeued_log(
            known, [(following + n, f"x/{following + n}") for n in range(length)], epoch=1
        )
        following += length
        assert read_dequeued_log(raw) == known == {n: f"x/{n}" for n in range(following)}


def test_the_golden_floor_is_read_and_written() -> None:
    floor = read_floor(golden("v1.floor"))
    assert floor == Floor(floor_ms=1_700_000_000_000, sealed_ms=1_699_999_000_000)
    assert write_floor(floor) == golden("v1.floor")


@given(*[st.integers(-1, 2**48 - 1)] * 4)
def test_a_floor_is_never_lowered(floor_ms: int, sealed_ms: int, to_ms: int, sealed_to_ms: int) -> None:
    before = Floor(floor_ms=floor_ms, sealed_ms=sealed_ms)
    after = before.raised(to_ms, sealed_to_ms)
    assert after.floor_ms == max(floor_ms, to_ms)
    assert after.sealed_ms == max(sealed_ms, sealed_to_ms)
    assert read_floor(write_floor(after)) == after
    assert NO_FLOOR.raised(to_ms, sealed_to_ms) == Floor(floor_ms=to_ms, sealed_ms=sealed_to_ms)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b'{"version":1,"floor_ms":1}',
        b'{"version":2,"floor_ms":1,"sealed_ms":1}',
        b'{"version":1,"floor_ms":1,"sealed_ms":1,"more":1}',
        b'{"version":1,"floor_ms":1,"sealed_ms":1,"\xff":1}',
        b'{"version":1,"floor_ms":"1","sealed_ms":1}',
        b'{"version":1,"floor_ms":1.5,"sealed_ms":1}',
        b'{"version":1,"floor_ms":-2,"sealed_ms":1}',
        b'{"version":1,"floor_ms":281474976710656,"sealed_ms":1}',
        b'{"version":1,"floor_ms":1,"sealed_ms":99999999999999999999999}',
        b'{"version":1,"floor_ms":1,"sealed_ms":1',
    ],
)
def test_a_damaged_floor_is_never_treated_as_a_missing_floor(raw: bytes) -> None:
    with pytest.raises(SerializationError):
        read_floor(raw)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 7), st.sampled_from([0, 0, 0, 0, 3])), max_size=12),
    first=st.integers(0, 5),
)
def test_a_ledger_edited_in_place_is_byte_for_byte_the_one_encoded_in_full(
    steps: list[tuple[int, int]], first: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_objects, "DEQUEUED_LOG_ENTRIES", 10)
        edited, following = DequeuedLog(), first
        known: dict[int, str] = {}
        for epoch, (length, hole) in enumerate(steps):
            following += hole
            removed = [(following + n, f"x/{following + n}" + "y" * (n % 3)) for n in range(length)]
            following += length
            raw, known = encode_dequeued_log(known, removed, epoch=epoch)
            edited = edited.after(removed, epoch=epoch)
            assert dict(edited.known) == known == read_dequeued_log(edited.raw)
            if known:
                assert edited.raw == raw


def test_a_dequeue_encodes_only_the_entries_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    full = DequeuedLog().after([(n, f"x/{n}") for n in range(DEQUEUED_LOG_ENTRIES)], epoch=1)
    encoded: list[int] = []
    encode = m.encode_entry

    def counting(sequence: int, item: NewEntry) -> bytes:
        encoded.append(sequence)
        return encode(sequence, item)

    monkeypatch.setattr(m, "encode_entry", counting)
    after = full.after([(DEQUEUED_LOG_ENTRIES, "x/new")], epoch=2)
    assert encoded == [DEQUEUED_LOG_ENTRIES]
    assert (min(after.known), len(after.known)) == (1, DEQUEUED_LOG_ENTRIES)
