"""§3.1, §4, §12.4 and §12.5 for clients: the state after a stop and after a crash."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from tests.contract.topics_server import Api, Server, serving

CLASSES = ("ephemeral", "memory", "disk", "fsync")


def leave(server: Server, how: str) -> None:
    if how == "stop":
        assert server.stop() == 0
    else:
        server.kill()


def build(api: Api) -> None:
    """Create one topic of each class, and topics with lost, deleted or expired records."""
    for durability in CLASSES:
        api.put(durability, durability=durability, ttl_ms=600_000)
        records = [
            {"data": {"n": n, "raw": [1.5, None]}, "tag": f"t{n % 3}", "node": "me", "meta": {"n": n}}
            for n in range(1, 301)
        ]
        api.write_records(durability, records, idempotency_key="k")
    for n in range(10):
        api.write("capped", n, config={"cap_records": 3, "durability": "fsync"})
    api.write("short", 1, 2, config={"ttl_ms": 20, "durability": "fsync"})
    time.sleep(0.05)
    assert api.state("short")["count"] == 0
    api.put("short", ttl_ms=600_000, durability="fsync", status=200)
    api.write("short", 3)
    api.delete("fsync", match="t0")
    api.delete("disk", before_seq=11)
    api.write("removed", 1)
    api.remove("removed")
    api.write("made-again", 1, 2, 3)
    api.remove("made-again")
    api.write("made-again", "new")
    api.put("queue", type="queue", dead_letter="elsewhere", max_deliveries=3)
    api.write("emptied", 1, 2, 3)
    api.delete("emptied", before_seq=4)


def everything(api: Api, topic: str) -> list[Any]:
    records: list[Any] = []
    while True:
        cursor = records[-1]["$seq"] if records else 0
        page = api.diff(topic, from_seq=cursor, limit=1000, include_tags=True)
        if not page["records"]:
            return records
        records += page["records"]


@pytest.fixture(scope="module", params=["stop", "kill"])
def restarted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that was stopped or killed and then restarted, with its state before that."""
    data = tmp_path_factory.mktemp(f"restart-{request.param}") / "data"
    before: dict[str, Any] = {}
    with serving(data) as server:
        api = server.api()
        build(api)
        for one in api.ask("GET", "/v0/topics")["topics"]:
            before[one["topic"]] = (api.state(one["topic"], touch="false"), everything(api, one["topic"]))
        leave(server, request.param)
    with serving(data) as server:
        yield server.api(), before, request.param


def test_every_topic_survives_with_its_config_and_no_other_appears(restarted: Any) -> None:
    api, before, _ = restarted
    listed = api.ask("GET", "/v0/topics")["topics"]
    assert {one["topic"] for one in listed} == before.keys()
    for topic, (state, _) in before.items():
        assert api.state(topic)["config"] == state["config"]


@pytest.mark.parametrize("topic", ["memory", "disk", "fsync", "capped", "short", "made-again", "emptied"])
def test_records_deletions_and_evictions_survive(restarted: Any, topic: str) -> None:
    api, before, _ = restarted
    state, records = before[topic]
    assert everything(api, topic) == records
    now = api.state(topic)
    for field in ("count", "bytes", "last_write_ts"):
        assert now[field] == state[field], field


def test_the_records_of_an_ephemeral_topic_are_gone_without_an_error(restarted: Any) -> None:
    api, _, how = restarted
    state = api.state("ephemeral")
    assert (state["count"], state["bytes"]) == (0, 0)
    assert state["config"]["durability"] == "ephemeral"
    if how == "stop":
        assert state["head_seq"] == 300, "its head was checkpointed"
    page = api.diff("ephemeral", from_seq=300)
    assert page["records"] == []


def test_the_head_never_decreases_and_is_exact_after_a_stop(restarted: Any) -> None:
    api, before, how = restarted
    for topic, (state, _) in before.items():
        now = api.state(topic)["head_seq"]
        if how == "stop" or topic in ("fsync", "capped", "short"):
            assert now == state["head_seq"], topic
        elif topic != "ephemeral":
            assert now >= state["head_seq"], topic


def test_floors_survive(restarted: Any) -> None:
    api, _, _ = restarted
    stone = api.diff("capped")["tombstone"]
    assert (stone["reason"], stone["gap_from"], stone["gap_to"], stone["earliest_seq"]) == ("cap", 1, 7, 8)
    stone = api.diff("short")["tombstone"]
    assert (stone["reason"], stone["gap_from"], stone["gap_to"]) == ("ttl", 1, 2)
    assert api.diff("fsync")["tombstone"] is None, "a deletion stays silent"


def test_a_sequence_is_never_used_again(restarted: Any) -> None:
    api, before, _ = restarted
    for topic, (state, _) in before.items():
        if topic in ("fsync", "disk", "emptied", "capped", "queue"):
            head = api.state(topic)["head_seq"]
            assert api.write(topic, "after")["first_seq"] == head + 1 > state["head_seq"]
            assert api.data_of(topic, from_seq=head) == ["after"]


def test_a_reader_continues_across_numbers_that_were_only_reserved(restarted: Any) -> None:
    """A reader at the head of a disk topic gets no report of a recreated topic."""
    api, before, _ = restarted
    page = api.diff("disk", from_seq=before["disk"][0]["head_seq"])
    assert page["tombstone"] is None
    assert page["caught_up"] is True


def test_deletions_by_tag_apply_to_records_from_before_the_restart(restarted: Any) -> None:
    api, _, _ = restarted
    assert api.delete("fsync", match="t1")["deleted"] == 100
    assert api.delete("fsync", match="t0")["deleted"] == 0


def test_a_repeated_write_is_not_recognised_after_a_restart(restarted: Any) -> None:
    api, _, _ = restarted
    head = api.state("memory")["head_seq"]
    answer = api.write("memory", "again", idempotency_key="k")
    assert (answer["deduped"], answer["seqs"]) == (False, [head + 1])


def test_times_never_decrease(restarted: Any) -> None:
    api, _, _ = restarted
    api.write("made-again", "later")
    times = [record["$ts"] for record in everything(api, "made-again")]
    assert times == sorted(times)


def test_damage_in_sealed_data_is_an_error_and_does_not_affect_the_rest(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server:
        api = server.api()
        api.write("good", *range(50))
        api.write("bad", *[f"record {n}" for n in range(50)])
        assert server.stop() == 0
    spoilt = [path for path in data.rglob("seg-*.data") if b"record 7" in path.read_bytes()]
    assert len(spoilt) == 1
    content = bytearray(spoilt[0].read_bytes())
    content[content.index(b"record 7")] ^= 1
    spoilt[0].write_bytes(content)
    with serving(data) as server:
        api = server.api()
        page = api.diff("bad")
        assert [record["data"] for record in page["records"]] == [f"record {n}" for n in range(7)]
        error = api.refused("POST", "/v0/topics/bad/diff", {"from_seq": 7}, status=500)
        assert error["code"] == "internal"
        assert api.data_of("good") == list(range(50))
        assert api.data_of("bad", from_seq=8)[0] == "record 8"
        assert api.write("bad", "new")["first_seq"] == 51


def test_a_torn_tail_is_cut_and_nothing_before_it_is_lost(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server:
        server.api().write("x", "kept", config={"durability": "fsync"})
        server.api().write("x", "torn to pieces")
        server.kill()
    (log,) = data.rglob("wal-*.log")
    content = bytearray(log.read_bytes())
    content[content.index(b"torn to pieces")] ^= 1
    log.write_bytes(content)
    with serving(data) as server:
        assert server.api().data_of("x")[0] == "kept"
        assert "torn" not in server.api().client.post("/v0/topics/x/diff").text


def test_the_files_of_a_removed_topic_are_deleted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server:
        server.api().write("x", *range(100))
        assert server.stop() == 0
    assert list(data.rglob("seg-*"))
    with serving(data) as server:
        server.api().remove("x")
        deadline = time.monotonic() + 10
        while list(data.rglob("seg-*")):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_old_segments_are_read_from_the_cold_directory(tmp_path: Path) -> None:
    data, cold = tmp_path / "data", tmp_path / "cold"
    settings = {
        "TOPICS_COLD_DIR": str(cold),
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    }
    with serving(data, **settings) as server:
        server.api().write("x", *range(100))
        assert server.stop() == 0
    with serving(data, **settings) as server:
        api = server.api()
        deadline = time.monotonic() + 20
        while not list(cold.rglob("seg-*.data")):
            assert time.monotonic() < deadline, "nothing was moved"
            time.sleep(0.05)
        page = api.diff("x", limit=1000)
        assert [record["data"] for record in page["records"]] == list(range(100))
        assert page["performance"].get("cold_segments_read", 0) > 0


def test_every_log_is_replayed_for_any_configured_number_of_shards(tmp_path: Path) -> None:
    data = tmp_path / "data"
    names = [f"t{number}" for number in range(8)]
    for turn, shards in enumerate(("2", "1"), 1):
        with serving(data, TOPICS_WAL_SHARDS=shards) as server:
            api = server.api()
            for name in names:
                api.write(name, f"turn {turn}", config={"durability": "fsync"})
                assert api.data_of(name) == [f"turn {number}" for number in range(1, turn + 1)]
                assert api.seqs_of(name) == list(range(1, turn + 1))
            server.kill()
    with serving(data, TOPICS_WAL_SHARDS="2") as server:
        for name in names:
            assert server.api().seqs_of(name) == [1, 2]


def test_files_are_where_tools_expect_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data, TOPICS_WAL_SHARDS="2") as server:
        server.api().write("x", *range(10))
        assert server.stop() == 0
    found = {str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()}
    assert ".topics.lock" in found
    for pattern in (
        r"wal/shard-0[01]/wal-\d{16}\.log",
        r"wal/shard-0[01]/CURRENT",
        r"meta/snapshot-\d{16}\.bin",
        r"topics/[0-9A-F]{8}/seg-0{15}1\.data",
        r"topics/[0-9A-F]{8}/seg-0{15}1\.idx",
    ):
        assert [path for path in found if re.fullmatch(pattern, path)], (pattern, found)
    (snapshot,) = data.glob("meta/snapshot-*.bin")
    assert snapshot.read_bytes().startswith(b"SNP1")
    (index,) = data.rglob("seg-*.idx")
    assert index.stat().st_size == 10 * 20
