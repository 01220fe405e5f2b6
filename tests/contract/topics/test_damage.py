"""§5.2: a record whose stored bytes are damaged is not skipped silently; the reader learns its position."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.topics_server import Api, Server, environment, serving

from penstock.topics.client.sync import Client
from penstock.topics.errors import Damaged

DAMAGED = 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Return the server of a topic `x` with five records; the third is damaged on disk."""
    data = tmp_path / "data"
    with serving(data) as running:
        running.api().put("x", durability="fsync")
        running.api().write("x", *(f"record-{seq}" for seq in range(1, 6)))
    damage(data, f"record-{DAMAGED}".encode())
    with serving(data) as running:
        yield running


def damage(data: Path, text: bytes) -> None:
    hit = [path for path in data.rglob("*.data") if text in path.read_bytes()]
    assert hit, "a stop leaves the records in segments"
    for path in hit:
        path.write_bytes(path.read_bytes().replace(text, text.upper()))


def test_a_page_ends_before_the_damage_and_the_next_one_locates_it(server: Server) -> None:
    api = server.api()
    page = api.ask("POST", "/v0/topics/x/diff", {})
    assert ([record["$seq"] for record in page["records"]], page["next_from_seq"]) == ([1, 2], 2)
    error = api.refused("POST", "/v0/topics/x/diff", {"from_seq": 2}, status=500)
    assert error["detail"] == {"topic": "x", "first_seq": DAMAGED, "last_seq": DAMAGED}
    assert error["message"].startswith(f'topic "x": stored record {DAMAGED} ')
    assert "from_seq" in error["message"]
    assert f"before_seq {DAMAGED + 1}" in error["message"]


def test_both_remedies_in_the_message_work(server: Server) -> None:
    api = server.api()
    assert seqs(api, DAMAGED) == [4, 5]
    api.ask("POST", "/v0/topics/x/delete", {"before_seq": DAMAGED + 1})
    assert seqs(api, 0) == [4, 5]


def seqs(api: Api, from_seq: int) -> list[int]:
    page = api.ask("POST", "/v0/topics/x/diff", {"from_seq": from_seq})
    return [record["$seq"] for record in page["records"]]


def test_the_client_raises_damaged_immediately(server: Server) -> None:
    with Client(server.url, retry_deadline="30s") as client, pytest.raises(Damaged) as caught:
        client.diff("x", 2)
    assert caught.value.detail == {"topic": "x", "first_seq": DAMAGED, "last_seq": DAMAGED}
    assert server.log.read_text().count("Damaged") == 1, "it was asked again"


def test_the_command_exits_with_5_and_points_to_verify(server: Server) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "topics", "diff", "x", "--url", server.url, "--raw"],
        env=environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.splitlines() == [b'"record-1"', b'"record-2"']
    assert (ended.returncode, b"penstock topics verify" in ended.stderr) == (5, True), ended.stderr
    assert b"Traceback" not in ended.stderr


def test_a_log_that_lost_its_end_is_reported_and_no_number_is_assigned_twice(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data, TOPICS_WAL_SHARDS="1") as running:
        running.api().put("x", durability="fsync")
        running.api().write("x", "kept-1", "kept-2")
    with serving(data, TOPICS_WAL_SHARDS="1") as running:
        assert running.api().write("x", "lost-3", "lost-4")["last_seq"] == 4
        running.kill()
    newest = max(data.glob("wal/wal-*.log"))
    newest.write_bytes(newest.read_bytes()[: newest.read_bytes().index(b"lost-3") - 60])
    verified = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "topics", "verify", str(data)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (verified.returncode, newest.name in verified.stdout) == (5, True), verified.stdout
    with serving(data, TOPICS_WAL_SHARDS="1") as running:
        api = running.api()
        written = api.write("x", "new")
        assert written["first_seq"] > 4
        page = api.diff("x", from_seq=4)
        assert [record["data"] for record in page["records"]] == ["new"], "a reader that was ahead"
        page = api.diff("x", from_seq=2)
        gap = page["tombstone"]
        assert (gap["reason"], gap["gap_from"], gap["gap_to"]) == ("lost", 3, written["first_seq"] - 1)
        assert [record["data"] for record in page["records"]] == ["new"]
        assert 'topic "x": records from 3 on are lost with the log' in running.log.read_text()
