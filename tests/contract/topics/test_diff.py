"""§5: the records and the next position of a diff, and its report of records that are gone."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.contract.topics_server import Api

# --- 5.2 ---------------------------------------------------------------------------------------------------


def test_a_diff_has_all_its_fields_and_a_tombstone_even_when_there_is_none(api: Api, topic: str) -> None:
    api.write(topic, {"a": 1})
    page = api.diff(topic)
    assert page.keys() == {
        "topic",
        "records",
        "next_from_seq",
        "head_seq",
        "earliest_seq",
        "caught_up",
        "tombstone",
        "lag",
        "performance",
    }
    assert page["records"][0].keys() == {"$seq", "$ts", "data"}
    assert (page["topic"], page["next_from_seq"], page["head_seq"], page["earliest_seq"]) == (topic, 1, 1, 1)
    assert (page["caught_up"], page["tombstone"], page["lag"]) == (True, None, 0)
    assert page["performance"]["records_scanned"] == 1
    assert "cold_segments_read" not in page["performance"]


def test_an_empty_topic_is_caught_up(api: Api, topic: str) -> None:
    api.put(topic)
    page = api.diff(topic)
    assert (page["records"], page["next_from_seq"], page["head_seq"], page["earliest_seq"]) == ([], 0, 0, 1)
    assert (page["caught_up"], page["tombstone"], page["lag"]) == (True, None, 0)


def test_absent_fields_of_a_record_are_omitted(api: Api, topic: str) -> None:
    api.write_records(
        topic,
        [{"data": None}, {"data": 1, "tag": "t"}, {"data": 2, "node": "n"}, {"data": 3, "meta": {"m": 1}}],
    )
    records = api.diff(topic, include_tags=True)["records"]
    common = {"$seq", "$ts", "data"}
    assert [record.keys() - common for record in records] == [set(), {"$tag"}, {"$node"}, {"meta"}]
    assert records[0]["data"] is None


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, {"meta"}),
        ({"include_tags": True}, {"$tag", "meta"}),
        ({"include_meta": False}, set()),
        ({"include_tags": True, "include_meta": False}, {"$tag"}),
    ],
)
def test_tags_are_hidden_and_meta_is_shown_by_default(
    api: Api, topic: str, fields: dict[str, bool], shown: set[str]
) -> None:
    api.write_records(topic, [{"data": 1, "tag": "t", "node": "n", "meta": {"m": 1}}])
    (record,) = api.diff(topic, **fields)["records"]
    assert record.keys() == {"$seq", "$ts", "$node", "data"} | shown


def test_the_cursor_is_exclusive(api: Api, topic: str) -> None:
    api.write(topic, "a", "b", "c")
    assert api.seqs_of(topic, from_seq=0) == [1, 2, 3]
    assert api.seqs_of(topic, from_seq=1) == [2, 3]
    assert api.seqs_of(topic, from_seq=3) == []


def test_pages_are_contiguous_until_the_reader_is_caught_up(api: Api, topic: str) -> None:
    api.write(topic, *range(10))
    seen: list[int] = []
    cursor, caught_up = 0, False
    while not caught_up:
        page = api.diff(topic, from_seq=cursor, limit=3)
        seen += [record["data"] for record in page["records"]]
        cursor, caught_up = page["next_from_seq"], page["caught_up"]
        assert page["lag"] == page["head_seq"] - cursor
        assert caught_up is (cursor == page["head_seq"])
    assert seen == list(range(10))


def test_a_batch_stops_before_the_record_that_would_exceed_it(api: Api, topic: str) -> None:
    api.write(topic, "x" * 8, "x" * 8, "x" * 8)
    for size, delivered in ((9, 1), (19, 1), (20, 2), (29, 2), (30, 3)):
        page = api.diff(topic, max_batch_bytes=size)
        assert (len(page["records"]), page["next_from_seq"]) == (delivered, delivered)


def test_records_of_the_readers_own_nodes_are_skipped_and_consumed(api: Api, topic: str) -> None:
    nodes = ["a", "b", None, "c", "a"]
    api.write_records(topic, [{"data": 1, "node": node} for node in nodes])
    assert api.seqs_of(topic, node="a") == [2, 3, 4]
    assert api.seqs_of(topic, node=["a", "c"]) == [2, 3]
    assert api.seqs_of(topic, node=[]) == [1, 2, 3, 4, 5]
    page = api.diff(topic, node=["a", "b"], from_seq=3, limit=1)
    assert [record["$seq"] for record in page["records"]] == [4]
    page = api.diff(topic, node="a", from_seq=4)
    assert (page["records"], page["next_from_seq"], page["caught_up"]) == ([], 5, True)


def test_a_reader_that_wrote_every_record_is_caught_up(api: Api, topic: str) -> None:
    api.write(topic, *range(300), node="me")
    page = api.diff(topic, node="me")
    assert (page["records"], page["next_from_seq"], page["caught_up"], page["lag"]) == ([], 300, True, 0)
    assert page["performance"]["records_scanned"] == 300


def test_node_filtering_can_be_turned_off_for_a_topic(api: Api, topic: str) -> None:
    api.put(topic, dedupe_node=False)
    api.write(topic, 1, node="me")
    assert api.seqs_of(topic, node="me") == [1]
    api.put(topic, status=200)
    assert api.seqs_of(topic, node="me") == []


def test_deleted_records_are_skipped_and_consumed(api: Api, topic: str) -> None:
    api.write_records(topic, [{"data": n, "tag": "gone" if n in (2, 4, 5) else "kept"} for n in range(1, 6)])
    api.delete(topic, match="gone")
    page = api.diff(topic)
    assert [record["$seq"] for record in page["records"]] == [1, 3]
    assert (page["next_from_seq"], page["caught_up"], page["tombstone"]) == (5, True, None)
    assert api.diff(topic, limit=1)["next_from_seq"] == 1


# --- 5.3 ---------------------------------------------------------------------------------------------------


def tombstone(page: Any) -> Any:
    stone = page["tombstone"]
    assert stone.keys() == {"gap_from", "gap_to", "reason", "missed_estimate", "earliest_seq", "head_seq"}
    assert stone["head_seq"] == page["head_seq"]
    return stone


def test_an_evicted_gap_is_reported_and_reading_continues_after_it(api: Api, topic: str) -> None:
    api.put(topic, cap_records=3)
    for number in range(6):
        api.write(topic, number)
    page = api.diff(topic)
    assert tombstone(page) == {
        "gap_from": 1,
        "gap_to": 3,
        "reason": "cap",
        "missed_estimate": 3,
        "earliest_seq": 4,
        "head_seq": 6,
    }
    assert page["earliest_seq"] == 4
    assert [record["$seq"] for record in page["records"]] == [4, 5, 6]
    assert api.state(topic)["count"] == 3


@pytest.mark.parametrize(("cursor", "gap"), [(0, (1, 3)), (1, (2, 3)), (2, (3, 3)), (3, None), (4, None)])
def test_a_gap_starts_after_the_cursor_and_ends_before_the_floor(
    api: Api, topic: str, cursor: int, gap: tuple[int, int] | None
) -> None:
    api.put(topic, cap_records=3)
    api.write(topic, *range(6))
    page = api.diff(topic, from_seq=cursor)
    if gap is None:
        assert page["tombstone"] is None
    else:
        stone = tombstone(page)
        assert (stone["gap_from"], stone["gap_to"]) == gap
        assert stone["missed_estimate"] == gap[1] - gap[0] + 1
    assert page["records"][0]["$seq"] == max(4, cursor + 1)


def test_an_expired_gap_is_reported_as_expired(api: Api, topic: str) -> None:
    api.put(topic, ttl_ms=20)
    api.write(topic, 1, 2)
    time.sleep(0.06)
    assert api.state(topic)["count"] == 0
    api.put(topic, ttl_ms=60_000, status=200)
    api.write(topic, 3)
    page = api.diff(topic)
    stone = tombstone(page)
    assert (stone["reason"], stone["gap_from"], stone["gap_to"], stone["earliest_seq"]) == ("ttl", 1, 2, 3)
    assert [record["$seq"] for record in page["records"]] == [3]


def test_a_gap_from_both_floors_is_mixed(api: Api, topic: str) -> None:
    api.put(topic, cap_records=4)
    api.write(topic, *range(6))
    time.sleep(0.06)
    api.put(topic, ttl_ms=20, status=200)
    assert api.state(topic)["count"] == 0
    assert tombstone(api.diff(topic))["reason"] == "mixed"
    assert tombstone(api.diff(topic, from_seq=1))["reason"] == "mixed"
    stone = tombstone(api.diff(topic, from_seq=2))
    assert (stone["reason"], stone["gap_from"], stone["gap_to"]) == ("ttl", 3, 6)
    assert api.diff(topic, from_seq=6)["tombstone"] is None


def test_a_deleted_gap_is_silent_and_moves_only_the_earliest(api: Api, topic: str) -> None:
    api.write(topic, 1, 2, 3, 4)
    api.delete(topic, before_seq=3)
    page = api.diff(topic)
    assert (page["tombstone"], page["earliest_seq"]) == (None, 3)
    assert [record["$seq"] for record in page["records"]] == [3, 4]


def test_a_gap_covers_lost_records_and_not_deleted_ones_after_them(api: Api, topic: str) -> None:
    api.put(topic, cap_records=4)
    api.write(topic, *range(6))
    api.delete(topic, before_seq=5)
    page = api.diff(topic)
    stone = tombstone(page)
    assert (stone["gap_to"], stone["earliest_seq"], page["earliest_seq"]) == (2, 3, 5)
    assert [record["$seq"] for record in page["records"]] == [5, 6]


def test_a_floor_never_decreases(api: Api, topic: str) -> None:
    api.put(topic, cap_records=1)
    api.write(topic, 1, 2, 3)
    api.put(topic, status=200)
    api.write(topic, 4)
    stone = tombstone(api.diff(topic))
    assert (stone["gap_to"], stone["reason"]) == (2, "cap")


def test_a_cursor_beyond_the_head_means_a_recreated_topic(api: Api, topic: str) -> None:
    api.write(topic, 1, 2)
    page = api.diff(topic, from_seq=9)
    assert tombstone(page) == {
        "gap_from": 1,
        "gap_to": 2,
        "reason": "recreated",
        "missed_estimate": 2,
        "earliest_seq": 1,
        "head_seq": 2,
    }
    assert [record["$seq"] for record in page["records"]] == [1, 2]
    assert (page["next_from_seq"], page["caught_up"]) == (2, True)


def test_a_cursor_beyond_an_empty_topic_misses_one_by_estimate(api: Api, topic: str) -> None:
    api.put(topic)
    page = api.diff(topic, from_seq=2**64 - 1)
    stone = tombstone(page)
    assert (stone["gap_from"], stone["gap_to"], stone["missed_estimate"]) == (1, 0, 1)
    assert (stone["reason"], stone["earliest_seq"]) == ("recreated", 1)
    assert (page["records"], page["next_from_seq"], page["caught_up"], page["lag"]) == ([], 0, True, 0)


def test_a_cursor_beyond_the_head_continues_at_the_earliest_record(api: Api, topic: str) -> None:
    api.put(topic, cap_records=2)
    api.write(topic, *range(5))
    page = api.diff(topic, from_seq=6)
    stone = tombstone(page)
    assert (stone["reason"], stone["gap_from"], stone["gap_to"], stone["earliest_seq"]) == (
        "recreated",
        1,
        5,
        4,
    )
    assert [record["$seq"] for record in page["records"]] == [4, 5]


def test_expired_records_in_the_middle_are_skipped_and_consumed(api: Api, topic: str) -> None:
    """A record expires by its own time, even if it was not swept yet."""
    api.put(topic, ttl_ms=100)
    api.write(topic, 1)
    time.sleep(0.15)
    api.write(topic, 2)
    page = api.diff(topic, from_seq=0)
    assert [record["$seq"] for record in page["records"]] == [2]
    assert page["tombstone"]["reason"] == "ttl"
    assert page["caught_up"] is True
