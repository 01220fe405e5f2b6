"""The probes of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from penstock.config import Secret
from penstock.errors import Rejected
from penstock.http.listener import Listener
from penstock.http.message import Fault, Request, Response
from penstock.up import Fleet, FleetMap, PartState, PartStatus, Plan, UpSettings
from penstock.up.health import Front, metrics_of, readiness_of
from penstock.up.lifecycle import ProbeResult
from penstock.up.parts import Layout, Probe, reachable
from penstock.up.runner import ask
from penstock.up.status import PartKind


def status(name: str, state: PartState, **more: object) -> PartStatus:
    return PartStatus(name=name, kind=PartKind.TOPICS, state=state, since_ms=1, **more)  # type: ignore[arg-type]


class Behind:
    """An application that responds with the path and key of the request."""

    def begin(self, request: Request, deliver: object) -> None:
        assert callable(deliver)
        key = request.headers.get(b"authorization", b"")
        deliver(Response(200, request.path + key, content_type=b"text/plain"))

    def screen(self, request: Request) -> Response | None:
        return None

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        return Response(400)


@asynccontextmanager
async def served(
    tmp_path: Path, behind: Behind | None = None, check: Callable[[Request], None] = lambda request: None
) -> AsyncIterator[tuple[Fleet, str]]:
    layout = Layout(base=str(tmp_path), data_dir=str(tmp_path))
    plan = Plan(settings=UpSettings(), layout=layout, parts=(), map=FleetMap(data_dir=str(tmp_path)))
    fleet = Fleet(plan, ())
    listener = Listener(Front(fleet, behind, check=check))
    host, port = await listener.bind("127.0.0.1", 0)
    try:
        yield fleet, f"{host}:{port}"
    finally:
        await listener.drain(timeout_s=5)


async def test_the_fleet_is_ready_when_every_part_is(tmp_path: Path) -> None:
    async with served(tmp_path) as (fleet, address), httpx.AsyncClient() as client:
        url = f"http://{address}"
        assert (await client.get(f"{url}/health")).json() == {"status": "ok"}
        fleet.own(status("a", PartState.READY))
        fleet.own(status("b", PartState.DISABLED))
        assert (await client.get(f"{url}/ready")).json() == {"ready": True, "not_ready": []}
        fleet.own(status("c", PartState.FAILED, last_error="no"))
        answer = await client.get(f"{url}/ready")
        assert answer.status_code == 503
        waiting = [{"name": "c", "state": "failed"}]  # the console shows the reason
        assert answer.json() == {"ready": False, "not_ready": waiting}
        assert (await client.post(f"{url}/ready")).status_code == 405
        assert (await client.get(f"{url}/other")).status_code == 404
        assert "fleet_part_state" in (await client.get(f"{url}/metrics")).text


def only_here(request: Request) -> None:
    if not request.headers.get(b"host", b"").startswith(b"127.0.0.1:"):
        raise Rejected("by no other name")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_a_request_by_another_name_of_this_machine_is_refused(tmp_path: Path, path: str) -> None:
    """Another site whose name resolves to this machine (DNS rebinding) could read it."""
    async with served(tmp_path, check=only_here) as (fleet, address), httpx.AsyncClient() as client:
        fleet.own(status("a", PartState.FAILED))
        refused = await client.get(f"http://{address}{path}", headers={"host": "evil.example"})
        assert (refused.status_code, refused.json()) == (403, {"error": "by no other name"})
        answered = await client.get(f"http://{address}{path}")
        assert answered.status_code in (200, 503)
        for answer in (refused, answered):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"


async def test_other_requests_go_to_the_inner_application(tmp_path: Path) -> None:
    async with served(tmp_path, Behind()) as (_, address), httpx.AsyncClient() as client:
        assert (await client.get(f"http://{address}/console")).text == "/console"
        assert (await client.get(f"http://{address}/health")).json() == {"status": "ok"}


async def test_a_probe_distinguishes_ready_not_ready_and_silent(tmp_path: Path) -> None:
    async with served(tmp_path, Behind()) as (fleet, address):
        assert await ask(address, Probe(path="/ready")) is ProbeResult.READY
        assert await ask(address, Probe(path="/x", key=Secret("k"))) is ProbeResult.READY
        fleet.own(status("a", PartState.STARTING))
        assert await ask(address, Probe(path="/ready")) is ProbeResult.NOT_READY
    assert await ask(address, Probe(path="/ready")) is ProbeResult.SILENT
    assert await ask("nonsense", Probe(path="/ready")) is ProbeResult.SILENT

    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(garbage, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await ask(f"127.0.0.1:{port}", Probe(path="/")) is ProbeResult.NOT_READY


def test_a_server_that_listens_everywhere_is_reached_here() -> None:
    assert reachable("0.0.0.0:4000") == "127.0.0.1:4000"
    assert reachable("[::]:4000") == "[::1]:4000"
    assert reachable("10.0.0.1:4000") == "10.0.0.1:4000"


def test_metrics_and_readiness_name_every_part() -> None:
    parts = [status("a", PartState.READY, restarts=2), status("b", PartState.RESTARTING)]
    text = metrics_of(parts)
    assert 'fleet_part_restarts{part="a",kind="topics"} 2' in text
    assert 'fleet_part_state{part="b",kind="topics",state="restarting"} 1' in text
    assert 'fleet_part_state{part="b",kind="topics",state="ready"} 0' in text
    assert readiness_of(parts)["ready"] is False
