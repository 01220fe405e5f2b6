"""§10.1: keys, scopes, prefixes, and the order of checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.contract.topics_server import PROTOCOLS, Api, Server, fresh_name, serving

KEYS = ",".join(
    [
        "root",
        "reader:read",
        "writer:W",
        "deleter:del",
        "admin:ADMIN",
        "both:rw",
        "many:r+d",
        "everything:",
        "team:rw+d+a:team.|shared:",
        "prefixed::team.",
        "colons:read:a:b:c",
    ]
)
SCOPES = {
    "root": {"read", "write", "delete", "admin"},
    "reader": {"read"},
    "writer": {"write"},
    "deleter": {"delete"},
    "admin": {"admin"},
    "both": {"read", "write"},
    "many": {"read", "delete"},
    "everything": {"read", "write", "delete", "admin"},
}
ENDPOINTS: list[tuple[str, str, object, str]] = [
    ("PUT", "/v0/topics/{}", {}, "admin"),
    ("GET", "/v0/topics/{}", None, "read"),
    ("GET", "/v0/topics", None, "read"),
    ("DELETE", "/v0/topics/{}", None, "delete"),
    ("POST", "/v0/topics/{}", {"records": [{"data": 1}]}, "write"),
    ("POST", "/v0/topics/{}/diff", {}, "read"),
    ("POST", "/v0/topics/{}/delete", {"before_seq": 1}, "delete"),
    ("GET", "/v0/metrics", None, "read"),
]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("locked") / "data"
    with serving(data, TOPICS_API_KEYS=KEYS) as running:
        yield running


@pytest.fixture(scope="module", params=PROTOCOLS)
def apis(request: pytest.FixtureRequest, locked: Server) -> dict[str | None, Api]:
    """The API with each key and without a key, over both protocols."""
    names: list[str | None] = [None, *(entry.partition(":")[0] for entry in KEYS.split(","))]
    return {name: locked.api(request.param, key=name) for name in names}


def ask(api: Api, method: str, path: str, body: object, **options: Any) -> Any:
    sent: dict[str, Any] = {} if body is None else {"json": body}
    return api.client.request(method, path, **sent, **options)


@pytest.mark.parametrize(("method", "path", "body", "scope"), ENDPOINTS)
def test_every_endpoint_needs_its_scope(
    apis: dict[str | None, Api], method: str, path: str, body: object, scope: str
) -> None:
    for key, scopes in SCOPES.items():
        name = fresh_name()
        apis["root"].put(name)
        response = ask(apis[key], method, path.format(name), body)
        if scope in scopes:
            assert response.status_code == 200, (key, response.text)
        else:
            assert response.status_code == 403, key
            assert response.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize(("method", "path", "body", "scope"), ENDPOINTS)
def test_no_request_is_accepted_without_a_key(
    apis: dict[str | None, Api], topic: str, method: str, path: str, body: object, scope: str
) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "bearer root"},
        {"Authorization": "BEARER root"},
        {"Authorization": "Basic root"},
        {"Authorization": "root"},
        {"Authorization": "Bearer  root"},
        {"Authorization": "Bearer ROOT"},
        {"Authorization": "Bearer root:"},
    ):
        response = ask(apis[None], method, path.format(topic), body, headers=headers)
        assert response.status_code == 401, headers
        assert response.json()["error"]["code"] == "unauthorized"
    assert apis["root"].remove(topic)["deleted"] is False


def test_a_token_in_the_query_is_ignored_here(apis: dict[str | None, Api], topic: str) -> None:
    for path in (f"/v0/topics/{topic}?token=root", "/v0/metrics?token=root"):
        assert apis[None].refused("GET", path, status=401)["code"] == "unauthorized"


def test_without_a_key_no_route_is_revealed(apis: dict[str | None, Api]) -> None:
    nobody, root = apis[None], apis["root"]
    for method, path, status in (("GET", "/v0/nothing", 404), ("PATCH", "/v0/topics", 405)):
        assert nobody.refused(method, path, status=401)["code"] == "unauthorized"
        root.refused(method, path, status=status)


def test_the_key_and_the_scope_come_before_the_body(apis: dict[str | None, Api], topic: str) -> None:
    path = f"/v0/topics/{topic}"
    apis[None].refused("POST", path, status=401, content=b"{")
    apis["reader"].refused("POST", path, status=403, content=b"{")
    apis["writer"].refused("POST", path, status=415, content=b"{")


def test_a_key_with_prefixes_reaches_only_matching_names(apis: dict[str | None, Api], topic: str) -> None:
    team = apis["team"]
    for name in (f"team.{topic}", f"shared:{topic}"):
        team.put(name)
        team.write(name, 1)
        assert team.data_of(name) == [1]
        assert team.delete(name, before_seq=2)["deleted"] == 1
        assert team.remove(name)["deleted"] is True
    for name in (topic, f"Team.{topic}", f"team{topic}", f"shared{topic}", f"x.team.{topic}"):
        for method, path, body, _ in ENDPOINTS:
            if "{}" in path:
                error = team.refused(method, path.format(name), body, status=403)
                assert error["code"] == "forbidden"


def test_prefixes_are_compared_with_the_decoded_name(apis: dict[str | None, Api], topic: str) -> None:
    team = apis["team"]
    assert team.put(f"%74eam%2E{topic}")["topic"] == f"team.{topic}"
    team.refused("GET", f"/v0/topics/team%252E{topic}", status=403)
    team.refused("GET", f"/v0/topics/x%2Fteam.{topic}", status=403)


def test_prefixes_without_scopes_grant_every_scope(apis: dict[str | None, Api], topic: str) -> None:
    prefixed = apis["prefixed"]
    prefixed.put(f"team.{topic}")
    assert prefixed.remove(f"team.{topic}")["deleted"] is True
    prefixed.refused("PUT", f"/v0/topics/{topic}", {}, status=403)


def test_only_the_first_two_colons_split(apis: dict[str | None, Api], topic: str) -> None:
    apis["root"].put(f"a:b:c{topic}")
    assert apis["colons"].state(f"a:b:c{topic}")["count"] == 0
    apis["colons"].refused("GET", f"/v0/topics/a:b{topic}", status=403)


def test_a_list_has_only_names_that_the_key_covers(apis: dict[str | None, Api], topic: str) -> None:
    names = [f"{stem}{topic}" for stem in ("other.", "shared:", "team.", "zoo.")]
    for name in names:
        apis["root"].put(name)
    listed = [one["topic"] for one in apis["team"].ask("GET", "/v0/topics?page_size=1000")["topics"]]
    assert [name for name in names if name in listed] == names[1:3]
    assert all(name.startswith(("team.", "shared:")) for name in listed)
    first = apis["team"].ask("GET", "/v0/topics?page_size=1")
    assert len(first["topics"]) == 1
    assert apis["team"].ask("GET", "/v0/topics", params={"prefix": "other."})["topics"] == []


def test_an_inline_config_needs_admin_only_where_it_would_be_used(
    apis: dict[str | None, Api], topic: str
) -> None:
    writer, path = apis["writer"], f"/v0/topics/{topic}"
    body = {"records": [{"data": 1}], "config": {"ttl_ms": 5}}
    assert writer.refused("POST", path, body, status=403)["code"] == "forbidden"
    apis["root"].state(topic, status=404)
    assert writer.write(topic, 1)["created"] is True
    assert writer.write(topic, 1, config={"ttl_ms": 5})["created"] is False
    assert apis["root"].state(topic)["config"]["ttl_ms"] == 0
    assert writer.write(f"{topic}.2", 1, config=None)["created"] is True


def test_admin_for_a_config_is_checked_before_any_limit(apis: dict[str | None, Api], topic: str) -> None:
    writer, path = apis["writer"], f"/v0/topics/{topic}"
    writer.refused("POST", path, {"records": [], "config": {}}, status=403)
    writer.refused("POST", path, {"records": [{"data": 1}] * 10_001, "config": {}}, status=403)
    writer.refused("POST", path, {"records": 1, "config": {}}, status=400)


def test_a_key_is_never_revealed(locked: Server, apis: dict[str | None, Api], topic: str) -> None:
    response = apis[None].client.get(
        f"/v0/topics/{topic}", headers={"Authorization": "Bearer guessed-secret"}
    )
    assert "guessed-secret" not in response.text
    apis["root"].put(topic)
    said = locked.log.read_text()
    assert "guessed-secret" not in said
    assert not [key for key in ("root", "everything", "prefixed") if key in said.split()]


def test_probes_are_open_and_metrics_are_not(apis: dict[str | None, Api]) -> None:
    for path in ("/v0/health", "/healthz", "/v0/ready", "/readyz"):
        assert apis[None].client.get(path).status_code == 200
    apis[None].refused("GET", "/v0/metrics", status=401)
    apis["writer"].refused("GET", "/v0/metrics", status=403)
