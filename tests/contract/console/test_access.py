"""Access to the console: a one-time token opens a session, and other sites are refused."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import httpx
import pytest
from tests.contract.console.conftest import StageProcess


@pytest.fixture
def stranger(stage: StageProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{stage.url}/", timeout=30, trust_env=False) as client:
        yield client


def test_without_a_session_no_data_is_shown(stranger: httpx.Client) -> None:
    for path in ("api/overview", "api/live", "api/buffers", "api/topics", "api/trace?id=x", "api/nowhere"):
        answer = stranger.get(path)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "unauthorized"


def test_a_token_opens_one_session_and_is_then_invalid(stage: StageProcess, stranger: httpx.Client) -> None:
    token = stage.new_token()
    assert stranger.post("api/session", json={"token": token + "x"}).status_code == 401
    opened = stranger.post("api/session", json={"token": token})
    assert opened.status_code == 204
    assert stranger.get("api/overview").status_code == 200
    with httpx.Client(base_url=f"{stage.url}/", trust_env=False) as second:
        assert second.post("api/session", json={"token": token}).status_code == 401
        assert second.get("api/overview").status_code == 401


def test_the_cookie_is_limited_to_this_page(stage: StageProcess, stranger: httpx.Client) -> None:
    cookie = stranger.post("api/session", json={"token": stage.new_token()}).headers["set-cookie"]
    attributes = {part.strip() for part in cookie.split(";")[1:]}
    assert attributes == {"HttpOnly", "SameSite=Strict", "Path=/console"}
    assert cookie.startswith("penstock_console_")


def test_a_new_token_invalidates_the_previous_one_and_keeps_sessions(
    stage: StageProcess, console: httpx.Client, stranger: httpx.Client
) -> None:
    old = stage.new_token()
    stage.new_token()
    assert stranger.post("api/session", json={"token": old}).status_code == 401
    assert console.get("overview").status_code == 200


@pytest.mark.parametrize("path", ["/console", "/console/api/overview", "/console/static/app.js"])
def test_a_foreign_name_for_this_machine_is_refused(stage: StageProcess, path: str) -> None:
    host, port = stage.url.removeprefix("http://").removesuffix("/console").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", path, headers={"Host": f"evil.example:{port}"})
        answer = connection.getresponse()
        assert answer.status == 403
        assert b"not known by the name" in answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {},
    ],
)
def test_a_post_of_another_site_is_refused(
    stage: StageProcess, stranger: httpx.Client, headers: dict[str, str]
) -> None:
    stranger.post("api/session", json={"token": stage.new_token()})
    for path in ("api/pipelines/events/redrive", "api/databases/timeseries/query"):
        answer = stranger.post(path, json={"confirm": True}, headers=headers)
        assert answer.status_code == 403
        assert "another site" in answer.json()["error"]["message"]


def test_a_post_of_the_own_page_passes(stage: StageProcess, stranger: httpx.Client) -> None:
    stranger.post("api/session", json={"token": stage.new_token()})
    origin = stage.url.removesuffix("/console")
    for headers in ({"Sec-Fetch-Site": "same-origin"}, {"Origin": origin}):
        answer = stranger.post("api/databases/timeseries/query", json={"query": "1"}, headers=headers)
        assert answer.status_code == 200


def test_a_token_of_another_site_is_refused(stage: StageProcess, stranger: httpx.Client) -> None:
    headers = {"Origin": "http://evil.example"}
    token = stage.new_token()
    assert stranger.post("api/session", json={"token": token}, headers=headers).status_code == 403
    assert stranger.post("api/session", json={"token": token}).status_code == 204


def test_every_response_has_the_same_security_headers(console: httpx.Client, stranger: httpx.Client) -> None:
    answers = [
        stranger.get(""),
        stranger.get("static/nowhere.js"),
        stranger.get("api/overview"),
        console.get("overview"),
        console.get("buffers/nowhere"),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_body_that_is_not_json_is_refused(console: httpx.Client) -> None:
    form = console.post("pipelines/events/redrive", content="confirm=true")
    assert form.status_code == 415
    broken = console.post(
        "pipelines/events/redrive", content="{", headers={"Content-Type": "application/json"}
    )
    assert broken.status_code == 400
