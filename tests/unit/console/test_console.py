"""The console over HTTP, in one process: keys, static files, streams and a redrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tests.unit.console.hosts import FixedFleet, part

from penstock.config import Secret
from penstock.console import Console, ConsoleSettings
from penstock.console import console as console_module
from penstock.errors import ConfigError, Unavailable
from penstock.http.auth import Keyring
from penstock.up import FleetMap, TopicsPlace


@asynccontextmanager
async def serving(host: FixedFleet, keys: str = "") -> AsyncIterator[tuple[Console, httpx.AsyncClient]]:
    console = Console(host, ConsoleSettings(port=0, keys=Keyring.parse(keys, "KEYS")))
    await console.start()
    try:
        base = console.url.partition("#")[0]
        async with httpx.AsyncClient(base_url=f"{base}/", timeout=10, trust_env=False) as client:
            yield console, client
    finally:
        await console.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_with_keys_each_call_brings_one_and_there_is_no_token() -> None:
    async with serving(FixedFleet(), "look:read,do:read+write") as (console, client):
        assert "#" not in console.url
        assert (await client.get("api/overview")).status_code == 401
        assert (await client.get("api/overview", headers=bearer("wrong"))).status_code == 401
        assert (await client.get("api/overview", headers=bearer("look"))).status_code == 200
        assert (await client.post("api/session", json={"token": ""})).status_code == 401


async def test_it_answers_over_http_2_too_and_to_no_foreign_name() -> None:
    async with (
        serving(FixedFleet(), "k") as (console, _),
        httpx.AsyncClient(http1=False, http2=True, trust_env=False) as client,
    ):
        url = f"{console.url}/api/overview"
        assert (await client.get(url, headers=bearer("k"))).status_code == 200
        foreign = {**bearer("k"), "Host": "evil.example"}
        assert (await client.get(url, headers=foreign)).status_code == 403


async def test_to_change_something_a_key_needs_the_scope() -> None:
    path, body = "api/pipelines/nowhere/redrive", {"confirm": True}
    async with serving(FixedFleet(), "look:read,do:read+write") as (_, client):
        assert (await client.post(path, json=body, headers=bearer("look"))).status_code == 403
        assert (await client.post(path, json=body, headers=bearer("do"))).status_code == 404
        foreign = {**bearer("do"), "Origin": "http://evil.example"}
        assert (await client.post(path, json=body, headers=foreign)).status_code == 403


async def test_without_keys_it_is_for_this_machine_alone() -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_CONSOLE_KEYS"):
        ConsoleSettings(host="0.0.0.0")
    assert ConsoleSettings(host="0.0.0.0", keys=Keyring.parse("k")).port
    with pytest.raises(ConfigError, match="prefixes"):
        ConsoleSettings(keys=Keyring.parse("k:read:clicks"))
    with pytest.raises(ConfigError, match="65535"):
        ConsoleSettings(port=70000)


async def test_neither_token_nor_key_is_in_any_text() -> None:
    settings = ConsoleSettings(port=0, keys=Keyring.parse("secret-key"))
    assert "secret" not in repr(settings)
    assert "hidden" not in repr(TopicsPlace(part="t", data_dir="", key=Secret("hidden")))


async def test_a_port_that_is_taken_is_said_so() -> None:
    async with serving(FixedFleet()) as (console, _):
        port = int(console.url.partition("/console")[0].rpartition(":")[2])
        second = Console(FixedFleet(), ConsoleSettings(port=port))
        with pytest.raises(Unavailable, match=str(port)):
            await second.start()
        await second.close()


async def test_files_are_sent_once_and_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>" + "x" * 1000)
    (tmp_path / "js").mkdir()
    (tmp_path / "js" / "a.js").write_text("export {}")
    monkeypatch.setattr(console_module, "_STATIC", str(tmp_path))
    async with serving(FixedFleet()) as (console, client):
        url = console.url.partition("#")[0]
        page = await client.get(url)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-encoding"] == "gzip"
        assert page.text.startswith("<!doctype html>")
        again = await client.get(url, headers={"If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        script = await client.get("static/js/a.js", headers={"Accept-Encoding": "identity"})
        assert (script.text, script.headers["content-type"]) == (
            "export {}",
            "text/javascript; charset=utf-8",
        )
        (tmp_path / "js" / "a.js").write_text("export {x}")
        assert (await client.get("static/js/a.js")).headers["etag"] != script.headers["etag"]
        assert (await client.get("static/js")).status_code == 404


async def test_a_part_that_hangs_does_not_delay_the_overview() -> None:
    """The port of the part accepts connections and never responds."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    places = FleetMap(data_dir="", topics=TopicsPlace(part="topics", data_dir=""))
    running = part("topics", address=f"127.0.0.1:{port}")
    async with serving(FixedFleet(places, [running]), "k") as (_, client):
        async with asyncio.timeout(5):
            answer = await client.get("api/overview", headers=bearer("k"))
        (edge,) = answer.json()["flow"]["edges"]
        assert (edge["known"], edge["rate_records_s"]) == (False, None)
    server.close()
    await server.wait_closed()


async def lines_of(client: httpx.AsyncClient, path: str, count: int) -> list[tuple[str, str]]:
    """Return the first events of a stream, by name and data."""
    found: list[tuple[str, str]] = []
    name = ""
    async with client.stream("GET", path, headers=bearer("k")) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, line.removeprefix("data: ")))
                if len(found) == count:
                    return found
    return found


async def test_log_lines_from_before_the_first_viewer_are_sent_first() -> None:
    host = FixedFleet()
    host.say("before the start")
    async with serving(host, "k") as (_, client):
        host.say("after it")
        first, second, third = await lines_of(client, "api/live", 3)
        assert [json.loads(data)["text"] for _, data in (first, second)] == ["before the start", "after it"]
        assert third[0] == "overview"


async def test_a_client_that_was_away_too_long_gets_a_gap() -> None:
    host = FixedFleet()
    async with serving(host, "k") as (_, client):
        host.say("seen")
        async with client.stream("GET", "api/live", headers=bearer("k")) as answer:
            idents = [line async for line in _first_lines(answer, "id: ", 1)]
        last = int(idents[0].removeprefix("id: "))
        for number in range(5000):
            host.say(f"line {number}")
        name, data = (await lines_of(client, f"api/live?after={last}", 1))[0]
        gap = json.loads(data)
        assert name == "gap"
        assert gap["from"] == last + 1
        assert gap["to"] - gap["from"] >= 999


async def _first_lines(answer: httpx.Response, start: str, count: int) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith(start):
            yield line
            count -= 1
            if not count:
                return


async def test_a_console_that_closes_says_so_and_ends_its_streams() -> None:
    host = FixedFleet()
    console = Console(host, ConsoleSettings(port=0, keys=Keyring.parse("k")))
    await console.start()
    async with (
        httpx.AsyncClient(base_url=f"{console.url}/", timeout=10, trust_env=False) as client,
        client.stream("GET", "api/live", headers=bearer("k")) as answer,
    ):
        names = []
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
                if names == ["overview"]:
                    closing = asyncio.create_task(console.close())
        await closing
    assert names[-1] == "end"
    assert host.listeners == []
