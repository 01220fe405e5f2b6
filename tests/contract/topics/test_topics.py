"""§3: topic configuration, creating, reading the state, listing, deleting, priority."""

from __future__ import annotations

import base64
import json
import time

import pytest
from tests.contract.topics_server import Api

DEFAULTS = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durable": False,
    "durability": "disk",
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "lease_ms": 30_000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "leases_durable": False,
}
OTHERS = {
    "type": "queue",
    "ttl_ms": 60_000,
    "cap_records": 10,
    "cap_bytes": 1000,
    "discard": "reject",
    "durable": True,
    "durability": "fsync",
    "priority": -5,
    "auto_priority": False,
    "auto_create": False,
    "idempotency_window_ms": 5,
    "dedupe_node": False,
    "lease_ms": 1000,
    "claim_jitter_ms": 50,
    "max_deliveries": 3,
    "dead_letter": "elsewhere",
    "leases_durable": True,
}

# --- 3.1 ---------------------------------------------------------------------------------------------------


def test_a_fresh_topic_has_the_default_of_every_field(api: Api, topic: str) -> None:
    answer = api.put(topic)
    assert answer.keys() == {"topic", "created", "config", "performance"}
    assert (answer["topic"], answer["created"], answer["config"]) == (topic, True, DEFAULTS)


def test_every_field_is_kept_and_echoed_in_full(api: Api, topic: str) -> None:
    assert api.put(topic, **OTHERS)["config"] == OTHERS
    assert api.state(topic)["config"] == OTHERS


def test_fields_that_matter_only_for_queues_are_echoed_on_logs(api: Api, topic: str) -> None:
    config = {**OTHERS, "type": "log"}
    assert api.put(topic, **config)["config"] == config
    assert "queue" not in api.state(topic)


@pytest.mark.parametrize(
    ("asked", "durability"),
    [
        ({}, "disk"),
        ({"durable": False}, "disk"),
        ({"durable": True}, "fsync"),
        ({"durable": True, "durability": None}, "fsync"),
        ({"durable": True, "durability": "memory"}, "memory"),
        ({"durable": False, "durability": "fsync"}, "fsync"),
        ({"durability": "ephemeral"}, "ephemeral"),
        ({"durability": "disk"}, "disk"),
    ],
)
def test_an_explicit_durability_wins_over_its_alias(
    api: Api, topic: str, asked: dict[str, object], durability: str
) -> None:
    config = api.put(topic, **asked)["config"]
    assert config["durability"] == durability
    assert config["durable"] is (durability == "fsync")


def test_the_durability_of_a_topic_may_change_in_place(api: Api, topic: str) -> None:
    for count, durability in enumerate(("disk", "fsync", "memory", "ephemeral", "disk", "fsync"), 1):
        api.put(topic, durability=durability, status=201 if count == 1 else 200)
        api.write(topic, durability)
        state = api.state(topic)
        assert (state["head_seq"], state["count"]) == (count, count)
        assert state["config"]["durability"] == durability
    assert api.data_of(topic) == ["disk", "fsync", "memory", "ephemeral", "disk", "fsync"]


@pytest.mark.parametrize(
    ("field", "asked", "kept"),
    [
        ("lease_ms", 0, 100),
        ("lease_ms", 99, 100),
        ("lease_ms", 86_400_001, 86_400_000),
        ("claim_jitter_ms", 5001, 5000),
        ("priority", 2**31 - 1, 2**31 - 1),
        ("priority", -(2**31), -(2**31)),
    ],
)
def test_values_out_of_range_are_stored_clamped_but_a_priority_as_given(
    api: Api, topic: str, field: str, asked: int, kept: int
) -> None:
    assert api.put(topic, **{field: asked})["config"][field] == kept
    assert api.state(topic)["config"][field] == kept


def test_a_dead_letter_topic_has_a_topic_name(api: Api, topic: str) -> None:
    for name in ("", ".x", "a b", "x" * 256):
        error = api.refused("PUT", f"/v0/topics/{topic}", {"dead_letter": name}, status=400)
        assert error["code"] == "invalid_request"


def test_a_queue_is_not_its_own_dead_letter_topic_while_a_log_may_name_itself(api: Api, topic: str) -> None:
    body = {"type": "queue", "dead_letter": topic}
    assert api.refused("PUT", f"/v0/topics/{topic}", body, status=400)["code"] == "invalid_request"
    assert api.put(topic, dead_letter=topic)["config"]["dead_letter"] == topic


# --- 3.2 ---------------------------------------------------------------------------------------------------


def test_a_put_creates_once_and_then_answers_200(api: Api, topic: str) -> None:
    assert api.put(topic, ttl_ms=5)["created"] is True
    assert api.put(topic, ttl_ms=5, status=200)["created"] is False
    assert api.put(topic, ttl_ms=6, status=200)["created"] is False


def test_a_put_replaces_the_whole_config(api: Api, topic: str) -> None:
    api.put(topic, ttl_ms=60_000, cap_records=5, dedupe_node=False)
    config = api.put(topic, cap_bytes=7, status=200)["config"]
    assert config == {**DEFAULTS, "cap_bytes": 7}
    assert api.state(topic)["config"] == config


def test_the_type_of_a_topic_never_changes(api: Api, topic: str) -> None:
    for first, second in (("log", "queue"), ("queue", "log")):
        name = f"{topic}.{first}"
        api.put(name, type=first)
        error = api.refused("PUT", f"/v0/topics/{name}", {"type": second, "ttl_ms": 9}, status=409)
        assert error["code"] == "topic_exists_incompatible"
        assert error["detail"] == {"topic": name, "existing_type": first, "requested_type": second}
        assert api.state(name)["config"]["ttl_ms"] == 0


def test_a_tightened_cap_takes_effect_immediately(api: Api, topic: str) -> None:
    api.write(topic, 1, 2, 3, 4)
    api.put(topic, cap_records=1, status=200)
    assert api.state(topic)["count"] == 1
    assert api.diff(topic)["tombstone"]["reason"] == "cap"


def test_a_tightened_ttl_takes_effect_immediately(api: Api, topic: str) -> None:
    api.write(topic, 1, 2)
    time.sleep(0.03)
    api.put(topic, ttl_ms=1, status=200)
    assert api.state(topic)["count"] == 0
    assert api.diff(topic)["tombstone"]["reason"] == "ttl"


# --- 3.3 ---------------------------------------------------------------------------------------------------


def test_the_state_of_a_new_topic_is_empty(api: Api, topic: str) -> None:
    api.put(topic)
    state = api.state(topic)
    assert state.keys() == {
        "topic",
        "type",
        "head_seq",
        "earliest_seq",
        "next_seq",
        "count",
        "bytes",
        "config",
        "effective_priority",
        "last_write_ts",
        "last_read_ts",
        "performance",
    }
    assert (state["head_seq"], state["earliest_seq"], state["next_seq"]) == (0, 1, 1)
    assert (state["count"], state["bytes"], state["last_write_ts"]) == (0, 0, None)
    assert state["type"] == "log"


def test_the_state_of_a_queue_has_its_counts_and_type(api: Api, topic: str) -> None:
    api.put(topic, type="queue")
    api.write(topic, 1, 2)
    state = api.state(topic)
    assert state["type"] == "queue"
    assert state["queue"] == {"ready": 2, "in_flight": 0, "dead_lettered": 0}


def test_reading_the_state_never_creates_a_topic(api: Api, topic: str) -> None:
    api.state(topic, status=404)
    api.diff(topic, status=404)
    api.delete(topic, before_seq=1, status=404)
    assert api.ask("GET", "/v0/topics", params={"prefix": topic})["topics"] == []


def test_a_touching_read_counts_in_its_own_response(api: Api, topic: str) -> None:
    api.put(topic)
    before_ms = time.time_ns() // 1_000_000
    untouched = api.state(topic, touch="false")
    assert (untouched["last_read_ts"], untouched["effective_priority"]) == (None, 0)
    touched = api.state(topic)
    assert touched["effective_priority"] == 500
    assert before_ms <= touched["last_read_ts"] <= time.time_ns() // 1_000_000
    again = api.state(topic, touch="0")
    assert again["last_read_ts"] == touched["last_read_ts"]


def test_a_write_sets_its_time_and_does_not_count_as_a_read(api: Api, topic: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    api.write(topic, 1)
    state = api.state(topic, touch="false")
    assert before_ms <= state["last_write_ts"] <= time.time_ns() // 1_000_000
    assert (state["last_read_ts"], state["effective_priority"]) == (None, 0)


def test_count_bytes_and_earliest_are_exact(api: Api, topic: str) -> None:
    api.put(topic, cap_records=3)
    api.write_records(topic, [{"data": "x" * size, "tag": f"t{size}"} for size in range(1, 7)])
    state = api.state(topic)
    assert (state["count"], state["bytes"]) == (3, 6 + 7 + 8)
    assert (state["head_seq"], state["earliest_seq"], state["next_seq"]) == (6, 4, 7)
    api.delete(topic, match="t4")
    state = api.state(topic)
    assert (state["count"], state["bytes"], state["earliest_seq"]) == (2, 15, 5)
    api.delete(topic, before_seq=7)
    state = api.state(topic)
    assert (state["count"], state["bytes"], state["earliest_seq"]) == (0, 0, 7)


# --- 3.4 ---------------------------------------------------------------------------------------------------


def test_a_list_has_the_topics_by_name(api: Api, topic: str) -> None:
    for tail in ("b", "a", "B", "_", "0", "a:x"):
        api.put(f"{topic}.{tail}", durable=tail == "a")
    api.write(f"{topic}.a", 1, 2)
    listed = api.ask("GET", "/v0/topics", params={"prefix": f"{topic}."})
    assert listed.keys() == {"topics", "performance"}
    tails = ["0", "B", "_", "a", "a:x", "b"]
    assert [one["topic"] for one in listed["topics"]] == [f"{topic}.{tail}" for tail in tails]
    assert listed["topics"][3] == {
        "topic": f"{topic}.a",
        "head_seq": 2,
        "earliest_seq": 1,
        "count": 2,
        "bytes": 2,
        "durable": True,
        "effective_priority": 0,
    }


def test_pages_are_contiguous(api: Api, topic: str) -> None:
    names = [f"{topic}.{number}" for number in range(7)]
    for name in names:
        api.put(name, durability="ephemeral")
    seen: list[str] = []
    query = {"prefix": f"{topic}.", "page_size": "3", "cursor": ""}
    for _ in range(3):
        page = api.ask("GET", "/v0/topics", params=query)
        seen += [one["topic"] for one in page["topics"]]
        if "next_cursor" in page:
            assert json.loads(base64.b64decode(page["next_cursor"], validate=True)) == {"after": seen[-1]}
            query["cursor"] = page["next_cursor"]
    assert seen == names
    assert "next_cursor" not in page


def test_a_full_last_page_has_no_cursor(api: Api, topic: str) -> None:
    for number in range(4):
        api.put(f"{topic}.{number}", durability="ephemeral")
    page = api.ask("GET", "/v0/topics", params={"prefix": f"{topic}.", "page_size": "4"})
    assert "next_cursor" not in page


def test_a_cursor_may_name_a_deleted_topic(api: Api, topic: str) -> None:
    for number in range(3):
        api.put(f"{topic}.{number}")
    cursor = base64.b64encode(json.dumps({"after": f"{topic}.1"}).encode()).decode()
    api.remove(f"{topic}.1")
    page = api.ask("GET", "/v0/topics", params={"prefix": f"{topic}.", "cursor": cursor})
    assert [one["topic"] for one in page["topics"]] == [f"{topic}.2"]


@pytest.mark.parametrize(
    "cursor", ["!", "e30", base64.b64encode(b"x").decode(), base64.b64encode(b'{"after":1}').decode(), "%FF"]
)
def test_a_cursor_that_cannot_be_decoded_gets_400(api: Api, cursor: str) -> None:
    error = api.refused("GET", "/v0/topics", status=400, params={"cursor": cursor})
    assert error["code"] == "invalid_request"


def test_a_list_touches_only_on_request_and_only_the_read_time(api: Api, topic: str) -> None:
    api.put(topic)
    for touch, priority in (("", 0), ("false", 0), ("true", 500)):
        listed = api.ask("GET", "/v0/topics", params={"prefix": topic, "touch": touch})
        assert listed["topics"][0]["effective_priority"] == priority
    assert api.state(topic, touch="false")["last_read_ts"] is None


# --- 3.5, 3.6 ----------------------------------------------------------------------------------------------


def test_deleting_a_topic_twice_removes_it_once(api: Api, topic: str) -> None:
    api.write(topic, 1)
    answer = api.remove(topic)
    assert answer.keys() == {"topic", "deleted", "routers_removed", "performance"}
    assert (answer["topic"], answer["deleted"], answer["routers_removed"]) == (topic, True, [])
    api.state(topic, status=404)
    again = api.remove(topic)
    assert (again["deleted"], again["routers_removed"]) == (False, [])


def test_a_topic_with_records_is_kept_with_if_empty(api: Api, topic: str) -> None:
    api.write(topic, 1, 2)
    error = api.refused("DELETE", f"/v0/topics/{topic}?if_empty=true", status=409)
    assert error["code"] == "topic_not_empty"
    assert error["detail"] == {"topic": topic, "count": 2}
    api.delete(topic, before_seq=3)
    assert api.remove(topic, if_empty="true")["deleted"] is True
    assert api.remove(topic, if_empty="true")["deleted"] is False


def test_a_recreated_topic_is_a_new_topic(api: Api, topic: str) -> None:
    api.put(topic, ttl_ms=60_000)
    api.write_records(topic, [{"data": n, "tag": "t"} for n in range(5)], idempotency_key="k")
    api.remove(topic)
    answer = api.write(topic, "new", idempotency_key="k")
    assert (answer["created"], answer["deduped"], answer["seqs"]) == (True, False, [1])
    assert api.data_of(topic) == ["new"]
    assert api.state(topic)["config"]["ttl_ms"] == 0
    assert api.delete(topic, match="t")["deleted"] == 0


# --- 3.7 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "priority"),
    [
        ({}, 500),
        ({"auto_priority": False}, 0),
        ({"priority": 7}, 7),
        ({"priority": 0}, 0),
        ({"priority": -5000}, -1000),
        ({"priority": 2**31 - 1}, 1000),
        ({"priority": 10, "auto_priority": True}, 10),
    ],
)
def test_a_priority_is_clamped_when_used_and_automatic_only_without_one(
    api: Api, topic: str, config: dict[str, object], priority: int
) -> None:
    api.put(topic, **config)
    assert api.state(topic)["effective_priority"] == priority


def test_a_diff_is_consumption(api: Api, topic: str) -> None:
    api.put(topic)
    assert api.state(topic, touch="false")["effective_priority"] == 0
    api.diff(topic)
    state = api.state(topic, touch="false")
    assert state["last_read_ts"] is not None
    assert 490 <= state["effective_priority"] <= 500
