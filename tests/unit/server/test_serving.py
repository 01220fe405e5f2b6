"""The server as a process serves: bind first, recover, serve, drain, close."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.unit.server.doubles import MemoryEngine, http, until

from penstock.errors import ConfigError, Corrupt, Unavailable
from penstock.server.process import serve
from penstock.server.settings import ServerSettings
from penstock.topics.config import TopicConfig


class SlowEngine(MemoryEngine):
    """Recovers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.replay_progress = 0.5
        self.recovered = asyncio.Event()

    async def start(self) -> None:
        await self.recovered.wait()
        await super().start()


def settings(**variables: object) -> ServerSettings:
    return ServerSettings.from_env(
        {"TOPICS_PORT": "0", **{name: str(value) for name, value in variables.items()}}
    )


async def test_the_port_answers_before_the_log_is_replayed(tmp_path: Path) -> None:
    engine, stop, port_file = SlowEngine(), asyncio.Event(), tmp_path / "port"
    serving = asyncio.create_task(serve(settings(TOPICS_PORT_FILE=port_file), engine, stop))
    await until(port_file.exists)
    async with http(f"http://{port_file.read_text()}") as client:
        assert (await client.get("/v0/health")).status_code == 200
        assert (await client.get("/v0/ready")).status_code == 503
        engine.recovered.set()
        await until(lambda: engine.ready)
        assert (await client.get("/v0/ready")).status_code == 200
    stop.set()
    await serving
    assert engine.is_closed
    assert os.listdir(tmp_path) == ["port"]


async def test_a_stop_finishes_requests_wakes_polls_and_closes_the_engine(tmp_path: Path) -> None:
    engine, stop, port_file = MemoryEngine(), asyncio.Event(), tmp_path / "port"
    await engine.put_topic("x", TopicConfig())
    serving = asyncio.create_task(serve(settings(TOPICS_PORT_FILE=port_file), engine, stop))
    await until(port_file.exists)
    async with http(f"http://{port_file.read_text()}") as client:
        poll = asyncio.create_task(client.post("/v0/topics/x/diff", json={"wait_ms": 30_000}))
        await until(lambda: engine.polls == 1)
        engine.gate = asyncio.get_running_loop().create_future()
        write = asyncio.create_task(client.post("/v0/topics/x", json={"records": [{"data": 1}]}))
        await until(lambda: bool(engine.writes))
        stop.set()
        assert (await poll).status_code == 200
        assert not engine.is_closed
        engine.gate.set_result(None)
        assert (await write).json()["first_seq"] == 1
        await serving
    assert engine.is_closed


async def test_a_stop_while_recovering_is_heeded(tmp_path: Path) -> None:
    engine, stop = SlowEngine(), asyncio.Event()
    serving = asyncio.create_task(serve(settings(), engine, stop))
    await asyncio.sleep(0.01)
    stop.set()
    await serving
    assert not engine.ready


async def test_what_recovery_raises_comes_out_and_the_port_is_closed() -> None:
    engine = MemoryEngine()
    engine.error = Corrupt("no snapshot can be read")
    bound: list[int] = []
    with pytest.raises(Corrupt):
        await serve(settings(), engine, asyncio.Event(), on_bound=lambda host, port: bound.append(port))
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", bound[0])


async def test_a_taken_port_and_an_exposed_host_are_refused_with_a_sentence() -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{port}"):
        await serve(settings(TOPICS_PORT=port), MemoryEngine(), asyncio.Event())
    taken.close()
    with pytest.raises(ConfigError, match="TOPICS_API_KEYS"):
        await serve(settings(TOPICS_HOST="0.0.0.0"), MemoryEngine(), asyncio.Event())


async def test_a_port_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TOPICS_PORT_FILE"):
        await serve(settings(TOPICS_PORT_FILE=tmp_path / "missing" / "port"), MemoryEngine(), asyncio.Event())
