"""Names in requests are looked up only in the plan; invalid input gets an error message."""

from __future__ import annotations

from urllib.parse import quote

import httpx
import pytest
from tests.contract.console.conftest import StageProcess

NAMES = [
    "nowhere",
    "../events",
    "/etc/passwd",
    "<script>alert(1)</script>",
    "a" * 3000,
    "\x00",
    "http://evil",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", ["buffers/{}", "quivers/{}", "pipelines/{}", "pipelines/{}/dead-letters"])
def test_a_name_outside_the_plan_is_not_found(console: httpx.Client, path: str, name: str) -> None:
    answer = console.get(path.format(quote(name, safe="")))
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("name", ["<b>", "a/b", "a" * 300])
def test_an_invalid_topic_name_is_refused(console: httpx.Client, name: str) -> None:
    for path in ("topics/{}", "topics/{}/tail"):
        assert console.get(path.format(quote(name, safe=""))).status_code == 400


def test_a_database_outside_the_plan_is_not_queried(console: httpx.Client) -> None:
    for path in ("databases/http%3A%2F%2Fevil/query", "databases/nowhere/query"):
        assert console.post(path, json={"query": "1"}).status_code == 404


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"topic": "events"},
        {"topic": "events", "seq": "0"},
        {"topic": "events", "seq": "-1"},
        {"topic": "events", "seq": "1" * 30},
        {"topic": "../x", "seq": "1"},
        {"id": "../../etc/passwd"},
        {"id": "<script>"},
        {"buffer": "events", "sequence": "one"},
        {"buffer": "events", "sequence": "0", "index": str(2**63)},
    ],
)
def test_an_invalid_trace_states_the_valid_forms(console: httpx.Client, query: dict[str, str]) -> None:
    answer = console.get("trace", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "topics?limit=0",
        "topics?limit=x",
        "topics?after=notacursor",
        "pipelines/events/dead-letters?after=1:2",
        "pipelines/events/dead-letters?limit=-1",
    ],
)
def test_a_wrong_value_in_the_query_is_refused(console: httpx.Client, path: str) -> None:
    assert console.get(path).status_code == 400


@pytest.mark.parametrize(
    "name",
    [
        "../console.py",
        "%2e%2e/console.py",
        "..%2fconsole.py",
        ".hidden",
        "a\\b",
        "",
        "//etc/passwd",
        "x/../y",
    ],
)
def test_no_file_outside_of_the_page_is_served(stage: StageProcess, name: str) -> None:
    with httpx.Client(trust_env=False) as client:
        request = client.build_request("GET", f"{stage.url}/static/x")
        request.url = request.url.copy_with(raw_path=f"/console/static/{name}".encode())
        answer = client.send(request)
    assert answer.status_code in (401, 404)


def test_other_methods_and_paths_get_an_answer_in_json(console: httpx.Client) -> None:
    assert console.delete("overview").status_code == 405
    assert console.delete("overview").headers["allow"] == "GET"
    assert console.get("nothing/here").status_code == 404
    assert console.post("overview", json={}).json()["error"]["code"] == "method_not_allowed"
