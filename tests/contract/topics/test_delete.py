"""§6: deleting records."""

from __future__ import annotations

import pytest
from tests.contract.topics_server import Api


def fill(api: Api, topic: str) -> None:
    """Five records: two of `a`, one of `ab`, one of `b`, one without a tag."""
    tags = ["a", "ab", None, "b", "a"]
    api.write_records(topic, [{"data": place, "tag": tag} for place, tag in enumerate(tags)])


def test_a_delete_returns_the_remaining_counts(api: Api, topic: str) -> None:
    fill(api, topic)
    answer = api.delete(topic, before_seq=3)
    assert answer.keys() == {"topic", "deleted", "earliest_seq", "head_seq", "count", "bytes", "performance"}
    assert (answer["topic"], answer["deleted"], answer["earliest_seq"]) == (topic, 2, 3)
    assert (answer["head_seq"], answer["count"], answer["bytes"]) == (5, 3, 3)
    again = api.delete(topic, before_seq=3)
    assert (again["deleted"], again["count"]) == (0, 3)


@pytest.mark.parametrize(
    ("before_seq", "left"),
    [(0, [1, 2, 3, 4, 5]), (1, [1, 2, 3, 4, 5]), (2, [2, 3, 4, 5]), (6, []), (7, []), (2**64 - 1, [])],
)
def test_before_seq_deletes_everything_below_it_and_nothing_later(
    api: Api, topic: str, before_seq: int, left: list[int]
) -> None:
    fill(api, topic)
    assert api.delete(topic, before_seq=before_seq)["deleted"] == 5 - len(left)
    assert api.seqs_of(topic) == left
    assert api.write(topic, 1)["seqs"] == [6]
    assert api.seqs_of(topic) == [*left, 6]


@pytest.mark.parametrize(
    ("match", "gone"),
    [
        (["tag", "Eq", "a"], [1, 5]),
        (["tag", "Eq", "a*"], []),
        (["tag", "Eq", ""], []),
        (["tag", "Glob", "a*"], [1, 2, 5]),
        (["tag", "Glob", "ab*"], [2]),
        (["tag", "Glob", "*"], [1, 2, 4, 5]),
        ("a", [1, 5]),
        ("a*", [1, 2, 5]),
        ("*", [1, 2, 4, 5]),
        ("A", []),
        ("z*", []),
    ],
)
def test_match_deletes_the_records_with_a_matching_tag(
    api: Api, topic: str, match: object, gone: list[int]
) -> None:
    fill(api, topic)
    assert api.delete(topic, match=match)["deleted"] == len(gone)
    assert api.seqs_of(topic) == [seq for seq in range(1, 6) if seq not in gone]


@pytest.mark.parametrize(
    "match",
    [
        ["tag", "Glob", "a"],
        ["tag", "Glob", ""],
        ["tag", "eq", "a"],
        ["tag", "Regex", "a"],
        ["node", "Eq", "a"],
        ["tag", "Eq"],
        ["tag", "Eq", "a", "b"],
        ["tag", "Eq", 1],
        ["tag", "Eq", None],
        [],
        {},
        {"tag": "a"},
        1,
        True,
    ],
)
def test_anything_else_is_not_a_predicate(api: Api, topic: str, match: object) -> None:
    fill(api, topic)
    error = api.delete(topic, match=match, status=400)["error"]
    assert error["code"] == "invalid_request"
    assert api.state(topic)["count"] == 5


def test_the_text_before_the_star_is_literal(api: Api, topic: str) -> None:
    api.write_records(topic, [{"data": 1, "tag": tag} for tag in ("a*b", "a?c", "aXb")])
    assert api.delete(topic, match="a*c*")["deleted"] == 0
    assert api.delete(topic, match="a**")["deleted"] == 1
    assert api.delete(topic, match="a?*")["deleted"] == 1
    assert api.seqs_of(topic) == [3]


def test_both_selectors_delete_records_that_match_both(api: Api, topic: str) -> None:
    fill(api, topic)
    answer = api.delete(topic, before_seq=5, match="a*")
    assert (answer["deleted"], answer["earliest_seq"]) == (2, 3)
    assert api.seqs_of(topic) == [3, 4, 5]


def test_both_selectors_do_not_move_the_prefix(api: Api, topic: str) -> None:
    fill(api, topic)
    answer = api.delete(topic, before_seq=6, match="b")
    assert (answer["deleted"], answer["earliest_seq"], answer["count"]) == (1, 1, 4)
    assert api.seqs_of(topic) == [1, 2, 3, 5]


def test_a_delete_without_a_selector_is_refused_even_for_a_missing_topic(api: Api, topic: str) -> None:
    for body in ({}, {"before_seq": None}, {"match": None}, {"before_seq": None, "match": None}):
        error = api.refused("POST", f"/v0/topics/{topic}/delete", body, status=400)
        assert error["code"] == "invalid_request"
    error = api.delete(topic, match=["tag", "Glob", "a"], status=400)["error"]
    assert error["code"] == "invalid_request"
    error = api.delete(topic, before_seq=1, status=404)["error"]
    assert (error["code"], error["detail"]) == ("topic_not_found", {"topic": topic})


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_later_records_with_the_tag_survive(api: Api, topic: str, durability: str) -> None:
    api.put(topic, durability=durability)
    fill(api, topic)
    api.delete(topic, match="a")
    api.write_records(topic, [{"data": 9, "tag": "a"}])
    assert api.seqs_of(topic) == [2, 3, 4, 6]
    assert api.delete(topic, match="a")["deleted"] == 1


def test_a_deletion_is_silent_for_readers(api: Api, topic: str) -> None:
    fill(api, topic)
    api.delete(topic, match="a*")
    for cursor in range(6):
        page = api.diff(topic, from_seq=cursor)
        assert (page["tombstone"], page["caught_up"], page["next_from_seq"]) == (None, True, 5)


def test_deleting_everything_keeps_the_head(api: Api, topic: str) -> None:
    fill(api, topic)
    answer = api.delete(topic, before_seq=6)
    assert (answer["count"], answer["bytes"], answer["head_seq"], answer["earliest_seq"]) == (0, 0, 5, 6)
    state = api.state(topic)
    assert (state["head_seq"], state["next_seq"], state["earliest_seq"]) == (5, 6, 6)
    assert api.write(topic, 1)["seqs"] == [6]


def test_evicted_records_cannot_be_deleted_again(api: Api, topic: str) -> None:
    api.put(topic, cap_records=2)
    fill(api, topic)
    assert api.delete(topic, match="*")["deleted"] == 2
    assert api.delete(topic, before_seq=6)["deleted"] == 0
