"""§7: routers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.event_stream import Watcher
from tests.contract.topics_server import Api, Server, fresh_name, serving

SHOWN = {
    *("router", "source", "dest", "preserve_node", "preserve_tag", "filter", "allow_cycle", "guarantee"),
    "performance",
}


def put(api: Api, name: str, source: str, dest: str, *, status: int = 201, **more: object) -> dict[str, Any]:
    body = {"source": source, "dest": dest, **more}
    return api.ask("PUT", f"/v0/routers/{name}", body, status=status)


def refused(
    api: Api, method: str, path: str, body: object = None, *, status: int, code: str
) -> dict[str, Any]:
    error: dict[str, Any] = api.refused(method, path, body, status=status)
    assert error["code"] == code
    return error


@pytest.fixture
def ends() -> tuple[str, str]:
    return fresh_name("source"), fresh_name("dest")


@pytest.fixture
def routed(api: Api, ends: tuple[str, str]) -> tuple[str, str]:
    source, dest = ends
    put(api, f"{source}->{dest}", source, dest)
    return ends


def data_of(api: Api, topic: str) -> list[object]:
    return [record["data"] for record in api.diff(topic)["records"]]


def test_a_new_router_is_returned_completely_and_creates_both_topics(api: Api, ends: tuple[str, str]) -> None:
    source, dest = ends
    answer = put(api, f"{source}-%3E{dest}", source, dest)
    assert answer.keys() == SHOWN | {"created"}
    assert (answer["router"], answer["created"]) == (f"{source}->{dest}", True)
    assert (answer["source"], answer["dest"], answer["filter"]) == (source, dest, None)
    assert (answer["preserve_node"], answer["preserve_tag"]) == (True, True)
    assert (answer["allow_cycle"], answer["guarantee"]) == (False, "at_least_once")
    for topic in ends:
        assert api.state(topic)["head_seq"] == 0
    again = put(api, f"{source}->{dest}", source, dest, status=200)
    assert again["created"] is False


def test_a_copy_is_in_the_very_next_diff(api: Api, routed: tuple[str, str]) -> None:
    source, dest = routed
    api.write_records(source, [{"data": {"a": 1}, "tag": "t", "node": "n", "meta": {"m": 1}}])
    (record,) = api.diff(dest, include_tags=True)["records"]
    assert (record["$seq"], record["$tag"], record["$node"]) == (1, "t", "n")
    assert (record["data"], record["meta"]) == ({"a": 1}, {"m": 1})


def test_a_copy_is_in_the_very_next_state_and_in_the_routers_total(api: Api, routed: tuple[str, str]) -> None:
    source, dest = routed
    for value in range(20):
        api.write(source, value)
        assert api.state(dest)["count"] == value + 1
    api.write(source, 1)
    answer = api.ask("GET", f"/v0/routers/{source}->{dest}")
    assert answer.keys() == SHOWN | {"forwarded_total"}
    assert answer["forwarded_total"] == 21


def test_a_copy_wakes_a_long_poll(api: Api, server: Server, routed: tuple[str, str]) -> None:
    source, dest = routed
    other = server.api("h1")
    timer = threading.Timer(0.2, lambda: other.write(source, "late"))
    timer.start()
    began = time.monotonic()
    page = api.diff(dest, wait_ms=10_000)
    timer.join()
    assert [record["data"] for record in page["records"]] == ["late"]
    assert time.monotonic() - began < 5


async def test_copies_are_the_first_records_of_a_watch_of_the_destination(
    server: Server, routed: tuple[str, str], api: Api
) -> None:
    source, dest = routed
    watcher = Watcher(server, "h1")
    created = await watcher.create({dest: {}})
    await watcher.write(source, 1, 2)
    async with watcher.open(created["wid"]) as stream:
        record, caught_up = await stream.take(2)
        assert (record.name, caught_up.name) == ("record", "caught-up")
        assert [one["data"] for one in record.data["records"]] == [1, 2]
        await watcher.write(source, 3)
        live = await stream.next()
        assert [one["data"] for one in live.data["records"]] == [3]


async def test_a_tail_of_a_destination_starts_after_the_copies(
    server: Server, routed: tuple[str, str], api: Api
) -> None:
    source, dest = routed
    watcher = Watcher(server, "h1")
    await watcher.write(source, 1, 2)
    created = await watcher.create({dest: {"tail": True}})
    assert created["topics"][dest]["head_seq"] == 2


def test_a_copy_can_be_claimed_immediately(api: Api, ends: tuple[str, str]) -> None:
    source, dest = ends
    api.put(dest, type="queue")
    put(api, "q-" + dest, source, dest)
    api.write(source, "job")
    answer = api.ask("POST", f"/v0/topics/{dest}/claim", {"node": "w"})
    assert [job["data"] for job in answer["claimed"]] == ["job"]


def test_a_router_starts_at_the_head(api: Api, ends: tuple[str, str]) -> None:
    source, dest = ends
    api.write(source, "old")
    put(api, dest, source, dest)
    api.write(source, "new")
    assert data_of(api, dest) == ["new"]


def test_flags_and_filter_decide_what_is_copied_and_how(api: Api, ends: tuple[str, str]) -> None:
    source, dest = ends
    answer = put(api, dest, source, dest, filter="a*", preserve_node=False, preserve_tag=False)
    assert answer["filter"] == ["tag", "Glob", "a*"]
    records = [{"data": 1, "tag": "ab", "node": "n"}, {"data": 2, "tag": "b"}, {"data": 3}]
    api.write_records(source, records)
    (record,) = api.diff(dest, include_tags=True)["records"]
    assert record["data"] == 1
    assert not {"$tag", "$node"} & record.keys()


def test_exactly_once_copies_carry_their_origin(api: Api, ends: tuple[str, str]) -> None:
    source, dest = ends
    answer = put(api, "once-" + dest, source, dest, guarantee="exactly_once")
    assert answer["guarantee"] == "exactly_once"
    api.write_records(source, [{"data": 1, "meta": {"k": 1}}, {"data": 2, "meta": [1]}])
    first, second = (record["meta"] for record in api.diff(dest)["records"])
    origin = first["_topics_router"]
    assert (origin["router"], origin["source_topic"], origin["source_seq"]) == ("once-" + dest, source, 1)
    number, epoch = origin["source_topic_id"], origin["source_epoch"]
    assert origin["idempotency_key"] == f"router:once-{dest}:{number}:{epoch}:1"
    assert first["k"] == 1
    assert second["_topics_original_meta"] == [1]


def test_exactly_once_skips_records_that_the_destination_already_has(api: Api, ends: tuple[str, str]) -> None:
    source, dest = ends
    put(api, "once-" + dest, source, dest, guarantee="exactly_once")
    api.write_records(source, [{"data": 1}])
    (record,) = api.diff(dest)["records"]
    origin = record["meta"]["_topics_router"]
    origin |= {"source_seq": 2, "idempotency_key": origin["idempotency_key"].rpartition(":")[0] + ":2"}
    api.write_records(dest, [{"data": "direct", "meta": {"_topics_router": origin}}])
    api.write_records(source, [{"data": 2}, {"data": 3}])
    assert [record["data"] for record in api.diff(dest)["records"]] == [1, "direct", 3]


@pytest.mark.parametrize(
    "change",
    [
        {"source": None},
        {"dest": 1},
        {"preserve_node": None},
        {"preserve_tag": 1},
        {"create_dest": "yes"},
        {"allow_cycle": 0},
        {"guarantee": "twice"},
        {"filter": ["tag", "Like", "x"]},
        {"filter": 7},
        {"source": "bad name"},
        {"dest": ""},
    ],
)
def test_a_bad_value_is_refused_and_creates_nothing(
    api: Api, ends: tuple[str, str], change: dict[str, object]
) -> None:
    source, dest = ends
    body = {"source": source, "dest": dest} | change
    refused(api, "PUT", f"/v0/routers/r-{dest}", body, status=400, code="invalid_request")
    for topic in ends:
        refused(api, "GET", f"/v0/topics/{topic}", status=404, code="topic_not_found")


def test_a_router_joins_two_topics(api: Api, topic: str) -> None:
    body = {"source": topic, "dest": topic}
    refused(api, "PUT", "/v0/routers/self", body, status=400, code="invalid_request")
    api.refused("PUT", "/v0/routers/-bad", {"source": topic, "dest": "x"}, status=400)
    api.refused("PUT", "/v0/routers/r", {"dest": topic}, status=400)


def test_a_missing_destination_may_be_refused(api: Api, ends: tuple[str, str]) -> None:
    source, dest = ends
    body = {"source": source, "dest": dest, "create_dest": False}
    error = refused(api, "PUT", "/v0/routers/r", body, status=404, code="topic_not_found")
    assert error["detail"] == {"topic": dest}
    api.refused("GET", f"/v0/topics/{source}", status=404)


def test_a_second_source_is_refused(api: Api, routed: tuple[str, str], topic: str) -> None:
    source, dest = routed
    body = {"source": topic, "dest": dest}
    error = refused(api, "PUT", "/v0/routers/fan", body, status=409, code="topic_exists_incompatible")
    assert error["detail"] == {"topic": dest, "reason": "router_dest_fan_in"}
    api.refused("GET", f"/v0/topics/{topic}", status=404)
    put(api, "second-" + dest, source, dest)
    api.write(source, 1)
    assert data_of(api, dest) == [1, 1]


def test_a_router_cannot_change_its_topics(api: Api, routed: tuple[str, str], topic: str) -> None:
    source, dest = routed
    name = f"{source}->{dest}"
    body = {"source": source, "dest": topic}
    error = refused(api, "PUT", f"/v0/routers/{name}", body, status=409, code="topic_exists_incompatible")
    assert error["detail"] == {
        "router": name,
        "reason": "router_repoint_forbidden",
        "existing_source": source,
        "existing_dest": dest,
    }


def test_a_cycle_is_refused_with_its_path_and_an_allowed_one_terminates(
    api: Api, routed: tuple[str, str]
) -> None:
    source, dest = routed
    body = {"source": dest, "dest": source}
    error = refused(api, "PUT", "/v0/routers/back", body, status=409, code="router_cycle")
    assert error["detail"] == {"cycle": [dest, source, dest]}
    put(api, f"back-{dest}", dest, source, allow_cycle=True)
    assert api.write(source, "x")["seqs"] == [1]
    assert (api.state(source)["count"], api.state(dest)["count"]) == (5, 4)


def test_a_trimmed_source_is_reported_at_the_destination(api: Api, ends: tuple[str, str]) -> None:
    source, dest = ends
    api.put(source, cap_records=3)
    put(api, dest, source, dest)
    api.write_records(source, [{"data": value} for value in range(10)])
    page = api.diff(dest)
    assert [record["$seq"] for record in page["records"]] == [8, 9, 10]
    told = page["tombstone"]
    assert (told["reason"], told["gap_from"], told["gap_to"]) == ("source_trim", 1, 7)
    assert told["earliest_seq"] == page["earliest_seq"] == 8
    assert api.ask("GET", f"/v0/routers/{dest}")["forwarded_total"] == 10


def test_a_full_destination_holds_back_and_loses_nothing(api: Api, ends: tuple[str, str]) -> None:
    source, dest = ends
    api.put(dest, cap_records=2, discard="reject")
    put(api, dest, source, dest)
    api.write_records(source, [{"data": value} for value in range(5)])
    got: list[object] = []
    for _ in range(3):
        got += data_of(api, dest)
        api.delete(dest, before_seq=10)
    assert got == [0, 1, 2, 3, 4]


def test_routers_are_deleted_with_a_topic(api: Api, routed: tuple[str, str]) -> None:
    source, dest = routed
    answer = api.remove(source)
    assert answer["routers_removed"] == [f"{source}->{dest}"]
    error = refused(api, "GET", f"/v0/routers/{source}->{dest}", status=404, code="router_not_found")
    assert error["detail"] == {"router": f"{source}->{dest}"}


def test_a_router_can_be_deleted_and_its_copies_stay(api: Api, routed: tuple[str, str]) -> None:
    source, dest = routed
    api.write(source, 1)
    name = f"{source}->{dest}"
    answer = api.ask("DELETE", f"/v0/routers/{name}")
    assert answer.keys() == {"router", "deleted", "performance"}
    assert (answer["router"], answer["deleted"]) == (name, True)
    assert api.ask("DELETE", f"/v0/routers/{name}")["deleted"] is False
    api.write(source, 2)
    assert data_of(api, dest) == [1]


def test_deletes_do_not_cross_routers(api: Api, routed: tuple[str, str]) -> None:
    source, dest = routed
    api.write(source, 1)
    assert data_of(api, dest) == [1]
    api.delete(source, before_seq=10)
    assert data_of(api, dest) == [1]


def test_routers_are_listed_by_name_page_by_page(api: Api, topic: str) -> None:
    for place in range(3):
        put(api, f"{topic}.{place}", topic, f"{topic}-dest{place}")
    query = {"prefix": f"{topic}.", "page_size": "2"}
    first = api.ask("GET", "/v0/routers", params=query)
    assert [router["router"] for router in first["routers"]] == [f"{topic}.0", f"{topic}.1"]
    assert first["routers"][0].keys() == {"router", "source", "dest", "guarantee", "forwarded_total"}
    second = api.ask("GET", "/v0/routers", params=query | {"cursor": first["next_cursor"]})
    assert [router["router"] for router in second["routers"]] == [f"{topic}.2"]
    assert "next_cursor" not in second
    by_dest = api.ask("GET", "/v0/routers", params={"source": topic, "dest": f"{topic}-dest1"})
    assert [router["router"] for router in by_dest["routers"]] == [f"{topic}.1"]
    api.refused("GET", "/v0/routers?cursor=!", status=400)


def test_wrong_methods_and_content_types_are_refused(api: Api, topic: str) -> None:
    api.refused("POST", f"/v0/routers/{topic}", {}, status=405)
    assert api.client.put("/v0/routers/r", content=b"{}").status_code == 415


# ---- with other settings -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {
        "TOPICS_MAX_ROUTERS": "2",
        "TOPICS_API_KEYS": "root,reader:read,team::team.,admin:admin",
    }
    with serving(tmp_path_factory.mktemp("routers") / "data", key="root", **settings) as running:
        yield running


def test_keys_cover_both_ends_and_routers_are_counted(limited: Server) -> None:
    root, reader, team = (limited.api(key=key) for key in ("root", "reader", "team"))
    put(team, "team.r", "team.a", "team.b")
    body = {"source": "team.a", "dest": "other"}
    error = refused(team, "PUT", "/v0/routers/team.x", body, status=403, code="forbidden")
    assert error["detail"] == {"topic": "other"}
    put(root, "team.mixed", "team.a", "other")
    team.refused("GET", "/v0/routers/team.mixed", status=403)
    team.refused("DELETE", "/v0/routers/team.mixed", status=403)
    listed = team.ask("GET", "/v0/routers")["routers"]
    assert [router["router"] for router in listed] == ["team.r"]
    reader.refused("PUT", "/v0/routers/r", {"source": "a", "dest": "b"}, status=403)
    reader.refused("DELETE", "/v0/routers/team.r", status=403)
    full = refused(root, "PUT", "/v0/routers/r", {"source": "a", "dest": "b"}, status=429, code="throttled")
    assert full["detail"] == {"limit": "max_routers", "max": 2}
    root.refused("GET", "/v0/topics/a", status=404)
    limited.api().refused("GET", "/v0/routers", status=401)
    put(root, "team.r", "team.a", "team.b", status=200)
    assert root.client.get("/v0/metrics", headers={"Accept": "application/json"}).json()["routers"] == 2


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_routers_and_copies_survive_a_restart(tmp_path: Path, how: str) -> None:
    with serving(tmp_path / "data", TOPICS_WAL_SHARDS="2") as running:
        api = running.api()
        api.put("a", durable=True)
        api.put("b", durable=True)
        put(api, "a->b", "a", "b")
        api.write("a", 1)
        assert data_of(api, "b") == [1]
        api.write("b", "direct")
        api.write("a", 2)
        assert data_of(api, "b") == [1, "direct", 2]
        api.delete("a", before_seq=3)
        running.kill() if how == "kill" else running.stop()
    with serving(tmp_path / "data", TOPICS_WAL_SHARDS="2") as running:
        api = running.api()
        assert data_of(api, "b") == [1, "direct", 2]
        assert api.ask("GET", "/v0/routers/a->b")["forwarded_total"] == 2
        api.write("a", 3)
        assert data_of(api, "b") == [1, "direct", 2, 3]
