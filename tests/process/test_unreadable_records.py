"""Records that an earlier version took and decoders refuse: relay and diff name them and continue."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.process.cli_runner import penstock
from tests.process.topics_server import FSYNC, KEY, Server, serving

from penstock.topics.config import EngineConfig
from penstock.topics.engine import Engine
from penstock.topics.model import NewRecord

DEEP = b"[" * 973 + b"]" * 973
LONG = b"9" * 5000


async def _fill(data: Path) -> None:
    """Write as a version without limits did: `parsed` leaves the checks to the caller."""
    async with await Engine.open(EngineConfig(data_dir=str(data), wal_shards=2)) as engine:
        records = [NewRecord(msgspec.Raw(text)) for text in (b"1", DEEP, b"3", LONG, b"5")]
        await engine.write("t", records, config=FSYNC, create=True, parsed=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("unreadable") / "data"
    asyncio.run(_fill(data))
    with serving(data) as started:
        yield started


@pytest.mark.parametrize("form", ["--raw", "--json", None])
def test_diff_names_unreadable_records_prints_the_others_and_ends_with_1(
    server: Server, form: str | None
) -> None:
    asked = ["topics", "diff", "t", "--url", server.url, *([form] if form else [])]
    told = penstock(*asked, given=b"", code=1, TOPICS_API_KEY=KEY)
    assert told.stdout.count(b"\n") == 3
    assert told.stderr.decode().splitlines() == [
        "unreadable: record 2 of t is nested more than 136 levels deep",
        "unreadable: record 4 of t has a number of 5000 digits",
    ]


def test_relay_sets_unreadable_records_aside_names_them_and_moves_the_others(
    server: Server, tmp_path: Path
) -> None:
    asked = [
        "topics",
        "relay",
        "t",
        str(tmp_path / "store"),
        "--once",
        "--value",
        "data",
        "--url",
        server.url,
    ]
    told = penstock(*asked, given=b"", TOPICS_API_KEY=KEY)
    assert b"record 2 of t is nested" in told.stderr
    assert b"record 4 of t has a number of 5000 digits" in told.stderr
    assert penstock("buffer", "tail", tmp_path / "store").stdout.count(b"\n") == 3
    letters = [json.loads(path.read_bytes()) for path in sorted(tmp_path.rglob("*.dead/relay/*/*.json"))]
    assert [(letter["topic"], letter["seq"]) for letter in letters] == [("t", 2), ("t", 4)]
    assert DEEP in base64.b64decode(letters[0]["data"])
    assert LONG in base64.b64decode(letters[1]["data"])
    again = penstock(*asked, given=b"", TOPICS_API_KEY=KEY)
    assert b"Traceback" not in again.stderr
    assert penstock("buffer", "tail", tmp_path / "store").stdout.count(b"\n") == 3
