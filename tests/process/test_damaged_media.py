"""Files that are cut under a running server: what was in them is an error, everything else works on."""

from __future__ import annotations

import os
from pathlib import Path

from tests.process.cli_runner import penstock
from tests.process.topics_server import FSYNC, serving

from penstock.errors import PenstockError
from penstock.topics.client.sync import Client

_RECORDS = 40
_CUT = 16_000


def fill(client: Client, topic: str) -> None:
    client.write(topic, [{"n": n, "text": "x" * 1500} for n in range(_RECORDS)], config=FSYNC)


def read_past(client: Client, topic: str) -> tuple[int, int]:
    """How many records can be read, and how many are answered with an error."""
    good = bad = at = 0
    while at < _RECORDS:
        try:
            page = client.diff(topic, at)
        except PenstockError:
            bad, at = bad + 1, at + 1
        else:
            good, at = good + len(list(page.records())), page.next_from_seq
    return good, bad


def largest(folder: Path, pattern: str) -> Path:
    return max(folder.rglob(pattern), key=lambda path: path.stat().st_size)


def test_a_segment_that_is_cut_under_a_server_does_not_end_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data, TOPICS_WAL_SHARDS="1") as server, server.client() as client:
        fill(client, "t")
        fill(client, "other")
    with serving(data, TOPICS_WAL_SHARDS="1") as server, server.client() as client:
        cut = min(data.rglob("*.data"))
        assert read_past(client, "t") == (_RECORDS, 0)
        os.truncate(cut, _CUT)
        good, bad = read_past(client, "t")
        assert 5 <= good <= 10
        assert bad == _RECORDS - good
        assert read_past(client, "other") == (_RECORDS, 0)
        assert client.write("t", ["next"]).first_seq == _RECORDS + 1
        assert server.process.poll() is None
        told = penstock("topics", "verify", data, code=5).stdout.decode()
    assert cut.name in told
    assert "2 topics" in told


def test_a_log_that_is_cut_under_a_server_does_not_end_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data, TOPICS_WAL_SHARDS="1") as server, server.client() as client:
        fill(client, "other")
        fill(client, "t")
        assert read_past(client, "t") == (_RECORDS, 0)
        (log,) = data.rglob("wal-*.log")
        os.truncate(log, 2 * _CUT)
        good, bad = read_past(client, "t")
        assert (good, bad) == (0, _RECORDS)
        # What is written now makes the file longer again: there are zeros where records were.
        assert client.write("t", ["next"]).first_seq == _RECORDS + 1
        assert read_past(client, "t") == (0, _RECORDS)
        good, bad = read_past(client, "other")
        assert 10 <= good < 25
        assert bad == _RECORDS - good
        assert [record.seq for record in client.diff("t", _RECORDS).records()] == [_RECORDS + 1]
        assert server.process.poll() is None
