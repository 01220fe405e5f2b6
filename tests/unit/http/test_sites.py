"""Web pages of other sites: the names and origins that a server without keys accepts."""

from __future__ import annotations

import ast
import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.servers.doubles import MemoryEngine

import penstock
from penstock.errors import ConfigError
from penstock.http import Request, Sites
from penstock.http.auth import Keyring
from penstock.http.sites import allowed_hosts
from penstock.servers.process import serve_topics
from penstock.servers.settings import ServerSettings
from penstock.topics.config import EngineConfig

EVIL = b"evil.example:4000"


def asked(method: bytes = b"GET", **headers: bytes) -> Request:
    return Request(method, b"/", {name.replace("_", "-").encode(): value for name, value in headers.items()})


@pytest.mark.parametrize(
    "host",
    [b"", b"127.0.0.1:4000", b"[::1]:4000", b"10.1.2.3", b"localhost:4000", b"LOCALHOST.", b"a.localhost"],
)
def test_addresses_and_local_names_reach_a_server(host: bytes) -> None:
    assert Sites("127.0.0.1").refusal(asked(host=host)) is None


def test_this_machine_s_name_and_added_names_reach_it() -> None:
    own = socket.gethostname().encode()
    assert Sites("127.0.0.1").refusal(asked(host=own + b":1")) is None
    assert Sites("127.0.0.1", ["evil.example"]).refusal(asked(host=EVIL)) is None
    assert Sites("127.0.0.1", ["*"]).refusal(asked(host=EVIL)) is None


@pytest.mark.parametrize("method", [b"GET", b"DELETE", b"POST"])
@pytest.mark.parametrize(
    "host",
    [
        EVIL,
        b"localhost.evil.example",
        b"127.0.0.1.evil.example",
        b"a, localhost",
        b"[::1].evil.example",
        b"[::1]evil.example:80",
        b"localhost:80@evil.example",
        b"localhost:80:80",
    ],
)
def test_a_name_of_another_site_does_not(method: bytes, host: bytes) -> None:
    for where in ("127.0.0.1", "0.0.0.0"):
        assert Sites(where).refusal(asked(method, host=host)) is not None


@pytest.mark.parametrize("host", [b"", b"localhost"])
def test_the_name_in_a_target_counts_as_well_as_host(host: bytes) -> None:
    def target(text: bytes) -> Request:
        return Request(b"GET", text, {b"host": host})

    assert Sites("127.0.0.1").refusal(target(b"http://localhost:4000/v0/topics?a=b://c")) is None
    assert Sites("127.0.0.1").refusal(target(b"/v0/topics/http://evil.example/")) is None
    for text in (b"http://evil.example/v0/topics", b"HTTP://evil.example", b"http://evil.example:4000?x"):
        assert Sites("127.0.0.1").refusal(target(text)) is not None


def test_names_that_cannot_be_public_reach_a_server_for_other_machines() -> None:
    for host in (b"topics:4000", b"topics.default.svc.cluster.local", b"ip-10-0-0-1.ec2.internal"):
        assert Sites("0.0.0.0").refusal(asked(host=host)) is None
        assert Sites("127.0.0.1").refusal(asked(host=host)) is not None


def test_only_its_own_pages_use_a_server() -> None:
    sites = Sites("127.0.0.1", ["app.example.org"])
    host = b"localhost:4000"
    assert sites.refusal(asked(host=host, origin=b"http://localhost:4000")) is None
    assert sites.refusal(asked(host=host, origin=b"https://app.example.org")) is None
    for origin in (b"http://evil.example", b"http://localhost:9", b"null", b""):
        assert sites.refusal(asked(host=host, origin=origin)) is not None
    assert sites.refusal(asked(b"POST", host=host, sec_fetch_site=b"cross-site")) is not None
    assert sites.refusal(asked(b"POST", host=host, sec_fetch_site=b"same-origin")) is None
    assert sites.refusal(asked(b"GET", host=host, sec_fetch_site=b"cross-site")) is None


def test_a_name_with_scheme_or_port_is_refused_as_a_setting() -> None:
    assert allowed_hosts([" A.example.org "], "x") == ("a.example.org",)
    for name in ("http://a", "a:1", "", "*.a"):
        with pytest.raises(ConfigError, match="not a host name"):
            allowed_hosts([name], "TOPICS_ALLOWED_HOSTS")


def test_every_listener_has_its_sites_or_a_front_that_checks() -> None:
    """The console and the fleet's front run their own check; any other listener without one is a hole."""
    root = Path(penstock.__file__).parent
    silent = set()
    for path in root.rglob("*.py"):
        if "Listener(" not in (text := path.read_text()) or "penstock.http" not in text:
            continue
        for call in ast.walk(ast.parse(text)):
            is_listener = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Listener"
            if is_listener and not any(one.arg == "sites" for one in call.keywords):
                silent.add(str(path.relative_to(root)))
    assert silent == {"cli/up_run.py", "console/console.py"}


@asynccontextmanager
async def topics(tmp_path: Path, keys: str = "", hosts: tuple[str, ...] = ()) -> AsyncIterator[int]:
    stop, ready = asyncio.Event(), asyncio.Event()
    ports: list[int] = []
    settings = ServerSettings(
        port=0,
        keys=Keyring.parse(keys),
        allowed_hosts=hosts,
        engine=EngineConfig(data_dir=str(tmp_path)),
    )
    serving = asyncio.ensure_future(
        serve_topics(
            settings,
            MemoryEngine(),
            stop,
            on_bound=lambda host, port: ports.append(port),
            on_ready=ready.set,
        )
    )
    await ready.wait()
    try:
        yield ports[0]
    finally:
        stop.set()
        await serving


async def status(port: int, method: str, path: str, *headers: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{method} {path} HTTP/1.1", *headers, "Content-Length: 0", "Connection: close"]
    if any(header.startswith("Upgrade") for header in headers):
        lines = [*lines[:-1], "Connection: Upgrade"]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    answer = await reader.readline()
    writer.close()
    return int(answer.split()[1])


WISH = "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="


async def test_a_page_of_another_site_cannot_use_topics_without_keys(tmp_path: Path) -> None:
    async with topics(tmp_path) as port:
        rebound, local = "Host: evil.example", f"Host: localhost:{port}"
        for method in ("GET", "DELETE"):
            assert await status(port, method, "/v0/topics/x", rebound) == 403
            assert await status(port, method, "/v0/topics/x", local) != 403
        assert await status(port, "GET", "/v0/ws", local, "Origin: http://evil.example", *WISH) == 403
        assert await status(port, "GET", "/v0/ws", local, *WISH) == 101
        assert await status(port, "GET", "/v0/ws", local, f"Origin: http://localhost:{port}", *WISH) == 101
        assert await status(port, "GET", "/v0/health", "Host: 10.1.2.3:4000") == 200


async def test_an_added_name_or_a_key_admits_any_name(tmp_path: Path) -> None:
    async with topics(tmp_path, hosts=("evil.example",)) as port:
        assert await status(port, "GET", "/v0/topics/x", "Host: evil.example") == 404
    async with topics(tmp_path, keys="k") as port:
        assert await status(port, "GET", "/v0/topics/x", "Host: a.b", "Authorization: Bearer k") == 404
        assert await status(port, "GET", "/v0/topics/x", "Host: a.b") == 401
