"""The client and the command watch a real server that is killed."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.contract.topics_server import Server, environment, fresh_name, launch

from penstock.topics import TopicConfig
from penstock.topics.client import Client
from penstock.topics.client.sync import Client as BlockingClient


async def test_a_watch_survives_a_killed_and_restarted_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = launch(tmp_path / "data", TOPICS_PORT=port)
    server.wait_until_ready()
    seen: list[int] = []
    try:
        async with Client(server.url, retry_deadline="30s") as client:
            await client.write("t", [0], config=None)

            async def watch() -> None:
                async for event in client.watch(["t"]):
                    seen.extend(record.seq for record in event.records())
                    if seen and seen[-1] >= 60:
                        return

            watching = asyncio.create_task(watch())
            for number in range(1, 60):
                if number in (20, 40):
                    server.kill()
                    server = launch(tmp_path / "data", TOPICS_PORT=port)
                    server.wait_until_ready()
                await client.write("t", [number])
            head = (await client.state("t")).head_seq
            while head < 60:
                head = (await client.write("t", ["more"])).last_seq
            async with asyncio.timeout(30):
                await watching
            stored = [record.seq for record in (await client.diff("t", limit=1000)).records()]
        assert len(seen) == len(set(seen))
        assert seen == sorted(seen)
        # A crash may have used numbers that were never acknowledged; stored records were delivered.
        assert set(stored) >= set(seen)
        assert [seq for seq in stored if seq <= seen[-1]] == seen
    finally:
        server.stop()


def test_a_topic_created_during_an_outage_is_followed_from_its_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = launch(tmp_path / "data", TOPICS_PORT=port)
    server.wait_until_ready()
    seen: list[tuple[str, object]] = []
    try:
        with BlockingClient(server.url) as writer, BlockingClient(server.url, retry_deadline="30s") as client:
            writer.write("x1", ["old"])
            events = client.watch({"x*": "tail"})
            assert next(iter(events)).kind == "caught_up"
            server.kill()
            server = launch(tmp_path / "data", TOPICS_PORT=port)
            server.wait_until_ready()
            writer.write("x1", ["while away"])
            writer.write("x2", ["new while away"])
            for event in events:
                seen += [(event.topic, json.loads(bytes(record.data))) for record in event.records()]
                if len(seen) == 2:
                    break
        assert sorted(seen) == [("x1", "while away"), ("x2", "new while away")]
    finally:
        server.stop()


def test_the_command_reports_a_gap_with_the_servers_reason(server: Server) -> None:
    stem = fresh_name("gap")
    with BlockingClient(server.url) as client:
        client.put_topic(stem, TopicConfig(cap_records=1))
        client.write(stem, [1, 2, 3])
    command = [sys.executable, "-m", "penstock.cli", "topics", "watch", stem, "--url", server.url]
    command += ["--from-start", "-n", "1"]
    told = subprocess.run(command, capture_output=True, env=environment(), timeout=20, check=True)
    assert b"are gone (from_seq_too_old)" in told.stderr
    command += ["--json"]
    told = subprocess.run(command, capture_output=True, env=environment(), timeout=20, check=True)
    assert json.loads(told.stdout.splitlines()[0])["tombstone"]["reason"] == "from_seq_too_old"


def test_the_blocking_client_watches_too(server: Server, topic: str) -> None:
    with BlockingClient(server.url) as client:
        client.write(topic, [1, 2])
        kinds = []
        for event in client.watch([topic]):
            kinds.append(event.kind)
            if event.kind == "caught_up":
                break
    assert kinds == ["records", "caught_up"]


def test_a_diff_may_choose_by_tag(server: Server, topic: str) -> None:
    with BlockingClient(server.url) as client:
        for tag in ("a", "b", "a"):
            client.write(topic, [tag], tag=tag)
        assert [record.seq for record in client.diff(topic, match="a").records()] == [1, 3]
        assert client.diff(topic, match="a").next_from_seq == 3
        assert client.diff(topic, match="zzz").caught_up


def test_the_command_prints_records_as_they_are_written(server: Server) -> None:
    stem = fresh_name("cli")
    with BlockingClient(server.url) as client:
        client.write(f"{stem}.a", [{"n": 1}])
        command = [sys.executable, "-m", "penstock.cli", "topics", "watch", f"{stem}.*", "--url", server.url]
        with subprocess.Popen(
            [*command, "--json", "--from-start", "-n", "2"], stdout=subprocess.PIPE, env=environment()
        ) as process:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            client.write(f"{stem}.b", [{"n": 2}], tag="t")
            second = json.loads(process.stdout.readline())
            assert process.wait(20) == 0
    assert (first["topic"], first["record"]["data"]) == (f"{stem}.a", {"n": 1})
    assert (second["topic"], second["record"]["$tag"]) == (f"{stem}.b", "t")
