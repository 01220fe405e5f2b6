"""§14: the checklist of existing clients, items 1 to 7, 11 and 12, each as one conversation."""

from __future__ import annotations

from pathlib import Path

from tests.contract.topics_server import Api, Server, serving


def test_1_both_protocols_serve_health_write_and_diff(server: Server, topic: str) -> None:
    for protocol in ("h2", "h1"):
        api = server.api(protocol)
        assert api.ask("GET", "/v0/health")["status"] == "ok"
        api.write(topic, protocol)
    assert server.api("h2").data_of(topic) == ["h2", "h1"]


def test_2_the_first_write_creates_and_sequences_begin_at_one(api: Api, topic: str) -> None:
    first = api.write(topic, 1, status=201)
    assert (first["created"], first["first_seq"]) == (True, 1)
    second = api.write(topic, 2, status=200)
    assert (second["created"], second["first_seq"]) == (False, 2)


def test_3_an_identical_put_and_a_fresh_state(api: Api, topic: str) -> None:
    assert api.put(topic, status=201)["created"] is True
    assert api.put(topic, status=200)["created"] is False
    state = api.state(topic)
    assert (state["head_seq"], state["next_seq"], state["earliest_seq"]) == (0, 1, 1)


def test_4_what_a_diff_shows_by_default(api: Api, topic: str) -> None:
    api.write_records(topic, [{"data": 1, "tag": "t", "meta": {"m": 1}}])
    page = api.diff(topic)
    assert "tombstone" in page
    assert page["tombstone"] is None
    assert "$tag" not in page["records"][0]
    assert page["records"][0]["meta"] == {"m": 1}


def test_5_a_cap_of_three_after_six_writes(api: Api, topic: str) -> None:
    api.put(topic, cap_records=3)
    for number in range(6):
        api.write(topic, number)
    assert api.state(topic)["count"] == 3
    page = api.diff(topic)
    stone = page["tombstone"]
    assert (stone["reason"], stone["gap_from"]) == ("cap", 1)
    assert stone["earliest_seq"] == page["earliest_seq"] == page["records"][0]["$seq"]


def test_6_deletes(api: Api, topic: str) -> None:
    api.write_records(topic, [{"data": 1, "tag": "a"}, {"data": 2, "tag": "b"}, {"data": 3, "tag": "b2"}])
    assert api.delete(topic, match="a")["deleted"] == 1
    assert api.diff(topic)["tombstone"] is None
    api.delete(topic, match=["tag", "Glob", "b"], status=400)
    assert api.delete(topic, match=["tag", "Glob", "b*"])["deleted"] == 2
    api.delete(topic, status=400)


def test_7_own_records_are_skipped(api: Api, topic: str) -> None:
    api.write(topic, 1, 2, node="me")
    page = api.diff(topic, node="me")
    assert (page["records"], page["next_from_seq"], page["head_seq"]) == ([], 2, 2)


def test_11_refusals(api: Api, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    api.refused("POST", path, status=415, content=b'{"records":[{"data":1}]}')
    api.refused("POST", path, status=415, content=b"{}", headers={"Content-Type": "text/plain"})
    api.refused("PUT", f"{path}/diff", {}, status=405)
    api.refused("GET", "/v0/unknown", status=404)
    api.put(topic, cap_records=1, discard="reject")
    api.write(topic, 1)
    api.write(topic, 2, status=422)


def test_12_keys(tmp_path: Path) -> None:
    with serving(tmp_path / "data", TOPICS_API_KEYS="secret") as locked:
        for protocol in ("h1", "h2"):
            nobody = locked.api(protocol)
            nobody.refused("GET", "/v0/topics/x", status=401)
            assert nobody.ask("GET", "/v0/health")["status"] == "ok"
            locked.api(protocol, key="secret").refused("GET", "/v0/topics/x", status=404)
