from __future__ import annotations

import json
from typing import Literal

import pytest

from penstock.errors import Corrupt
from penstock.services import RelayGap, TopicChanged
from penstock.services.relay_batch import Gap, Identity, RelayBatch, identity_of
from penstock.topics.model import Page, Tombstone, TombstoneReason


def fragment(seq: int) -> bytes:
    return json.dumps({"$seq": seq, "$ts": 1000 + seq, "data": {"n": seq}}, separators=(",", ":")).encode()


def page(
    first: int,
    last: int,
    *,
    through: int | None = None,
    head: int | None = None,
    gone: Tombstone | None = None,
) -> Page:
    reached = last if through is None else through
    return Page(
        topic="t",
        fragments=[fragment(seq) for seq in range(first, last + 1)],
        next_from_seq=reached,
        head_seq=reached if head is None else head,
        earliest_seq=1,
        tombstone=gone,
        records_scanned=0,
    )


def tombstone(first: int, last: int, reason: TombstoneReason = "cap") -> Tombstone:
    return Tombstone(
        gap_from=first,
        gap_to=last,
        reason=reason,
        missed_estimate=last - first + 1,
        earliest_seq=last + 1,
        head_seq=99,
    )


def draft(
    after: int = 0,
    on_gap: Literal["fail", "skip", "record"] = "fail",
    value: Literal["record", "data"] = "record",
) -> RelayBatch:
    return RelayBatch(topic="t", after=after, value=value, on_gap=on_gap)


def records(made: RelayBatch) -> list[bytes]:
    found: list[bytes] = []
    for chunk in made.chunks:
        text = bytes(chunk.encode())
        while text:
            length = int.from_bytes(text[:4], "little")
            found.append(text[4 : 4 + length])
            text = text[4 + length :]
    return found


def runs(made: RelayBatch) -> list[tuple[int, dict[str, object]]]:
    return [(start, json.loads(payload)) for start, payload in made.metadata()]


def test_pages_become_one_batch_that_names_its_records() -> None:
    made = draft(after=2)
    made.add(page(3, 4, head=9))
    made.add(page(5, 7, through=9))
    assert records(made) == [fragment(seq) for seq in range(3, 8)]
    assert (made.after, made.through, made.count) == (2, 9, 5)
    assert made.record_bytes == sum(len(fragment(seq)) for seq in range(3, 8))
    assert runs(made) == [(0, {"topic": "t", "first": 3, "last": 7, "ts": 1007})]
    assert made.last == Identity(seq=7, ts_ms=1007)


def test_data_alone_is_copied_unchanged() -> None:
    made = draft(value="data")
    made.add(page(1, 2))
    assert records(made) == [b'{"n":1}', b'{"n":2}']


def test_a_page_without_records_only_moves_the_position() -> None:
    made = draft(after=5)
    made.add(page(1, 0, through=8))
    assert (made.through, made.count, made.metadata(), made.last) == (8, 0, [], None)


def test_a_gap_fails_and_leaves_the_batch_unchanged() -> None:
    made = draft()
    made.add(page(1, 2))
    with pytest.raises(RelayGap, match=r"records 3 to 5 of t are gone \(ttl\)") as caught:
        made.add(page(6, 7, gone=tombstone(3, 5, "ttl")))
    assert isinstance(caught.value, Corrupt)
    assert (made.through, made.count, made.gaps) == (2, 2, [])


def test_a_gap_that_is_skipped_is_counted_and_leaves_no_record() -> None:
    made = draft(on_gap="skip")
    made.add(page(4, 5, gone=tombstone(1, 3)))
    assert made.gaps == [Gap(first=1, last=3, reason="cap")]
    assert made.gaps[0].missed == 3
    assert (records(made), made.through) == ([fragment(4), fragment(5)], 5)


@pytest.mark.parametrize("value", ["record", "data"])
def test_a_recorded_gap_stands_in_place_of_its_records(value: Literal["record", "data"]) -> None:
    made = draft(on_gap="record", value=value)
    made.add(page(1, 2, head=9))
    made.add(page(6, 7, gone=tombstone(3, 5)))
    gap = {"first": 3, "last": 5, "reason": "cap"}
    assert json.loads(records(made)[2]) == {"gap": gap}
    assert runs(made) == [
        (0, {"topic": "t", "first": 1, "last": 2, "ts": 1002}),
        (2, {"topic": "t", "gap": gap}),
        (3, {"topic": "t", "first": 6, "last": 7, "ts": 1007}),
    ]
    assert (made.count, made.through) == (5, 7)


@pytest.mark.parametrize("on_gap", ["fail", "skip", "record"])
def test_a_topic_that_starts_over_is_never_a_gap(on_gap: Literal["fail", "skip", "record"]) -> None:
    made = draft(after=50, on_gap=on_gap)
    with pytest.raises(TopicChanged, match="relayed up to 50 and now ends at 3"):
        made.add(page(1, 3, gone=tombstone(1, 3, "recreated")))
    assert (made.through, made.count) == (50, 0)


def test_the_last_record_is_found_in_the_metadata_of_a_batch() -> None:
    made = draft(on_gap="record")
    made.add(page(1, 2, head=9))
    made.add(page(1, 0, through=5, gone=tombstone(3, 5)))
    payloads = [payload for _, payload in made.metadata()]
    assert identity_of(payloads, "t") == Identity(seq=2, ts_ms=1002)
    assert identity_of(payloads, "other") is None
    assert identity_of([], "t") is None


@pytest.mark.parametrize("payload", [b"", b"m", b"\xff", b"[]", b'{"topic":1}'])
def test_metadata_of_another_writer_is_ignored(payload: bytes) -> None:
    assert identity_of([payload], "t") is None
