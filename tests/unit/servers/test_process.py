"""The server process: bind first, recover, serve, drain, close."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.servers.doubles import MemoryEngine, http, until

from penstock.errors import ConfigError, Corrupt, Unavailable
from penstock.servers.process import serve_topics
from penstock.servers.settings import ServerSettings
from penstock.storage.fs import LockHeld
from penstock.topics import Engine
from penstock.topics.config import TopicConfig


class SlowEngine(MemoryEngine):
    """An engine that recovers on request."""

    def __init__(self) -> None:
        super().__init__()
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
    serving = asyncio.create_task(serve_topics(settings(TOPICS_PORT_FILE=port_file), engine, stop))
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
    serving = asyncio.create_task(serve_topics(settings(TOPICS_PORT_FILE=port_file), engine, stop))
    await until(port_file.exists)
    await until(lambda: engine.ready)
    await engine.put_topic("x", TopicConfig())
    async with http(f"http://{port_file.read_text()}") as client:
        poll = asyncio.create_task(client.post("/v0/topics/x/diff", json={"wait_ms": 30_000}))
        await until(lambda: engine.polls == 1)
        engine.committers.hold()
        write = asyncio.create_task(client.post("/v0/topics/x", json={"records": [{"data": 1}]}))
        await until(lambda: bool(engine.write_count))
        stop.set()
        assert (await poll).status_code == 200
        assert not engine.is_closed
        engine.committers.release()
        assert (await write).json()["first_seq"] == 1
        await serving
    assert engine.is_closed


async def test_a_stop_during_recovery_is_obeyed(tmp_path: Path) -> None:
    engine, stop = SlowEngine(), asyncio.Event()
    serving = asyncio.create_task(serve_topics(settings(), engine, stop))
    await asyncio.sleep(0.01)
    stop.set()
    await serving
    assert not engine.ready


async def test_an_error_of_recovery_is_raised_after_the_port_is_closed(tmp_path: Path) -> None:
    engine, port_file = SlowEngine(), tmp_path / "port"
    engine.error = Corrupt("no snapshot can be read")
    bound: list[int] = []

    def on_bound(host: str, port: int) -> None:
        bound.append(port)
        assert port_file.exists()
        engine.recovered.set()

    with pytest.raises(Corrupt):
        await serve_topics(settings(TOPICS_PORT_FILE=port_file), engine, asyncio.Event(), on_bound=on_bound)
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", bound[0])
    assert os.listdir(tmp_path) == []


async def test_an_error_before_recovery_is_raised_before_the_port_is_bound(tmp_path: Path) -> None:
    engine, bound = MemoryEngine(), list[int]()
    engine.error = LockHeld("in use")
    with pytest.raises(LockHeld):
        await serve_topics(
            settings(TOPICS_PORT_FILE=tmp_path / "port"),
            engine,
            asyncio.Event(),
            on_bound=lambda host, port: bound.append(port),
        )
    assert (bound, os.listdir(tmp_path)) == ([], [])


async def test_a_data_directory_in_use_is_reported_before_the_port_is_bound(tmp_path: Path) -> None:
    config = settings(
        TOPICS_DATA_DIR=tmp_path / "data", TOPICS_WAL_SHARDS=1, TOPICS_PORT_FILE=tmp_path / "port"
    )
    bound: list[int] = []
    async with await Engine.open(replace(config.engine, segment_process=False)):
        with pytest.raises(LockHeld, match="in use by process"):
            await serve_topics(
                config, Engine(config.engine), asyncio.Event(), on_bound=lambda host, port: bound.append(port)
            )
    assert (bound, os.listdir(tmp_path)) == ([], ["data"])


@pytest.mark.parametrize("name", ["TOPICS_DATA_DIR", "TOPICS_COLD_DIR"])
async def test_a_file_in_place_of_a_directory_is_refused_with_the_name_of_its_variable(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{name} .* not a directory"):
        await serve_topics(settings(**{name: tmp_path / "file"}), MemoryEngine(), asyncio.Event())


async def test_a_taken_port_closes_the_starting_engine() -> None:
    engine = SlowEngine()
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{port}"):
        await serve_topics(settings(TOPICS_PORT=port), engine, asyncio.Event())
    taken.close()
    assert (engine.ready, engine.is_closed) == (False, True)


async def test_a_taken_port_and_an_exposed_host_are_refused_with_a_message() -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{port}"):
        await serve_topics(settings(TOPICS_PORT=port), MemoryEngine(), asyncio.Event())
    taken.close()
    with pytest.raises(ConfigError, match="TOPICS_API_KEYS"):
        await serve_topics(settings(TOPICS_HOST="0.0.0.0"), MemoryEngine(), asyncio.Event())


async def test_a_port_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TOPICS_PORT_FILE"):
        await serve_topics(
            settings(TOPICS_PORT_FILE=tmp_path / "missing" / "port"), MemoryEngine(), asyncio.Event()
        )
