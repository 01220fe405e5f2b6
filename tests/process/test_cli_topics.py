"""`penstock topics …` as a person or a script runs it: a real server, real processes, real directories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.cli_runner import command, environment, penstock
from tests.process.topics_server import FSYNC, KEY, Server, serving

from penstock.topics.client.sync import Client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "data") as running:
        yield running


def lines(raw: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in raw.splitlines()]


def test_put_creates_a_topic_and_keeps_what_is_requested(server: Server) -> None:
    made = server.json("put", "clicks", "--durability", "fsync", "--ttl", "1h", "--cap-bytes", "1MiB")
    assert made["created"]
    config = made["config"]
    assert isinstance(config, dict)
    assert (config["durability"], config["ttl_ms"], config["cap_bytes"]) == ("fsync", 3_600_000, 1024**2)
    kept = server.json("put", "clicks", "--keep", "--cap-records", "5")["config"]
    assert isinstance(kept, dict)
    assert (kept["durability"], kept["ttl_ms"], kept["cap_records"]) == ("fsync", 3_600_000, 5)
    reset = server.json("put", "clicks")["config"]
    assert isinstance(reset, dict)
    assert (reset["durability"], reset["ttl_ms"], reset["cap_records"]) == ("disk", 0, 0)
    assert b"none" in server.run("put", "clicks")


def test_lines_go_in_and_come_out_as_they_were(server: Server) -> None:
    account = server.json(
        "write", "clicks", "--tag", "red", "--node", "me", given=b'{"a": 1}\n\n[1, 2]\n"\xc3\xa9"'
    )
    assert (account["written"], account["first_seq"], account["last_seq"]) == (3, 1, 3)
    assert server.run("diff", "clicks", "--raw").splitlines() == [b'{"a":1}', b"[1,2]", '"é"'.encode()]
    records = lines(server.run("diff", "clicks", "--json"))
    assert [(record["$seq"], record["$tag"], record["$node"]) for record in records] == [
        (1, "red", "me"),
        (2, "red", "me"),
        (3, "red", "me"),
    ]
    assert server.run("diff", "clicks", "--node", "me") == b""
    assert len(server.run("diff", "clicks", "--after", "1", "-n", "1").split(b"\t")) == 5


def test_diff_can_be_had_by_tag(server: Server) -> None:
    server.run("write", "t", "--tag", "big", given=b"1\n")
    server.run("write", "t", "--tag", "bigger", given=b"2\n")
    server.run("write", "t", given=b"3\n")
    assert server.run("diff", "t", "--raw", "--tag", "big") == b"1\n"
    assert server.run("diff", "t", "--raw", "--tag", "big*") == b"1\n2\n"
    assert server.run("diff", "t", "--raw", "--tag", "big*", "-f", "-n", "2") == b"1\n2\n"


def test_what_diff_prints_can_be_written_back(server: Server, tmp_path: Path) -> None:
    with server.client() as client:
        client.write("a", [{"n": n} for n in range(5)], tag="x", node="me")
    source = tmp_path / "records"
    source.write_bytes(server.run("diff", "a", "--json"))
    server.run("write", "b", "--envelope", "--file", source, "--batch-records", "2")
    left = [(r["$tag"], r["$node"], r["data"]) for r in lines(server.run("diff", "a", "--json"))]
    right = [(r["$tag"], r["$node"], r["data"]) for r in lines(server.run("diff", "b", "--json"))]
    assert left == right


def test_a_bad_line_stops_the_write_and_is_named(server: Server) -> None:
    told = penstock(
        "topics", "write", "t", "--url", server.url, "--key", KEY, given=b"1\n2\n{oops\n4\n", code=2
    )
    assert b"line 3" in told.stderr
    assert server.run("diff", "t", "--raw") == b"1\n2\n"


def test_a_gap_is_reported_and_may_be_fatal(server: Server) -> None:
    server.run("put", "small", "--cap-records", "2")
    server.run("write", "small", given=b"1\n2\n3\n4\n5\n")
    told = penstock("topics", "diff", "small", "--raw", "--url", server.url, "--key", KEY)
    assert told.stdout == b"4\n5\n"
    assert b"records 1 to 3 of small are gone (cap)" in told.stderr
    first = lines(server.run("diff", "small", "--json"))[0]
    assert isinstance(first["tombstone"], dict)
    assert (first["tombstone"]["gap_from"], first["tombstone"]["gap_to"]) == (1, 3)
    assert server.run("diff", "small", "--raw", "--fail-on-gap", code=1) == b""


def test_follow_prints_records_as_they_arrive(server: Server) -> None:
    with server.client() as client:
        client.write("live", [1])
        follower = subprocess.Popen(
            command(
                "topics", "diff", "live", "--after", "latest", "-f", "-n", "2", "--raw", "--url", server.url
            ),
            env=environment(TOPICS_API_KEY=KEY),
            stdout=subprocess.PIPE,
        )
        assert follower.stdout is not None
        try:
            deadline = time.monotonic() + 20
            seen = b""
            number = 1
            os.set_blocking(follower.stdout.fileno(), False)
            while follower.poll() is None and time.monotonic() < deadline:
                number += 1
                client.write("live", [number])
                time.sleep(0.1)
            seen = follower.stdout.read() or b""
        finally:
            follower.kill()
            follower.wait()
            follower.stdout.close()
    assert follower.returncode == 0
    printed = [int(text) for text in seen.split()]
    assert len(printed) == 2
    assert printed[1] == printed[0] + 1


def test_ls_and_stat_tell_what_is_there(server: Server) -> None:
    with server.client() as client:
        client.write("a:1", [1, 2])
        client.write("b", [1])
    listed = server.json("ls", "a:")["topics"]
    assert isinstance(listed, list)
    assert [(topic["topic"], topic["count"]) for topic in listed] == [("a:1", 2)]
    assert b"a:1" in server.run("ls")
    state = server.json("stat", "b")
    assert (state["head_seq"], state["count"], state["last_read_ms"]) == (1, 1, None)
    about = server.json("stat")
    assert about["ready"] is True
    assert b"records" in server.run("stat")


def test_delete_removes_records_or_the_topic(server: Server) -> None:
    with server.client() as client:
        client.write("t", [1, 2], tag="red/1")
        client.write("t", [3, 4], tag="blue")
    assert server.json("delete", "t", "--tag-prefix", "red/")["deleted"] == 2
    assert server.json("delete", "t", "--tag", "blue", "--before", "4")["deleted"] == 1
    assert b"deleted 0" in server.run("delete", "t", "--tag", "red")
    told = penstock(
        "topics", "delete", "t", "--topic", "--if-empty", "--url", server.url, "--key", KEY, code=2
    )
    assert b"hint" not in told.stderr
    assert server.json("delete", "t", "--topic", "--yes")["deleted"] is True
    assert b"there was no topic" in server.run("delete", "t", "--topic", "--yes")


def test_what_a_topic_cannot_become_is_a_wrong_request(server: Server) -> None:
    server.run("put", "t", "--type", "log")
    told = penstock("topics", "put", "t", "--type", "queue", "--url", server.url, "--key", KEY, code=2)
    assert b"hint" not in told.stderr


def test_a_count_of_one_is_singular(server: Server) -> None:
    assert b"1 record," in server.run("write", "one", given=b"1")
    assert b"cap                 1 record, then" in server.run("put", "one", "--cap-records", "1")
    assert b"deleted 1 record of one" in server.run("delete", "one", "--before", "2")


def test_ls_shows_which_topics_are_durable(server: Server) -> None:
    server.run("put", "a", "--durability", "fsync")
    server.run("put", "b")
    header, *rows = (line.split() for line in server.run("ls").splitlines())
    place = header.index(b"durable") - len(header)
    assert [row[place] for row in rows] == [b"yes", b"no"]


def test_removing_a_topic_without_a_terminal_needs_a_yes(server: Server) -> None:
    server.run("put", "t")
    told = penstock(
        "topics", "delete", "t", "--topic", "--url", server.url, "--key", KEY, given=b"y\n", code=2
    )
    assert b"give --yes" in told.stderr
    assert server.json("stat", "t")["topic"] == "t"


def test_a_copy_of_a_topic_with_a_gap_continues_after_it(server: Server) -> None:
    server.run("put", "small", "--cap-records", "2")
    server.run("write", "small", given=b"1\n2\n3\n4\n5\n")
    told = penstock(
        *("topics", "write", "copy", "--envelope", "--url", server.url, "--key", KEY),
        given=server.run("diff", "small", "--json"),
    )
    assert b"gap: line 1 of the input represents records 1 to 3, which are gone (cap)" in told.stderr
    assert server.run("diff", "copy", "--raw") == b"4\n5\n"


def test_the_help_says_that_stat_shows_the_server_too() -> None:
    assert b"Show the state of a topic, or of the server." in penstock("topics", "--help").stdout
    assert b"-1000 to 1000" in penstock("topics", "put", "--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["put", "t", "--priority", "1001"],
        ["put", "t", "--priority", "-1001"],
        ["delete", "t"],
        ["delete", "t", "--topic", "--tag", "x"],
        ["delete", "t", "--tag", "x", "--tag-prefix", "y"],
        ["delete", "t", "--before", "1", "--if-empty"],
        ["diff", "t", "--raw", "--json"],
        ["diff", "t", "--after", "soon"],
        ["put", "t", "--ttl", "soon"],
        ["put", "t", "--cap-bytes", "many"],
        ["put", "../t"],
        ["ls", "--url", "ftp://x"],
    ],
)
def test_wrong_usage_is_refused_without_a_server(arguments: list[str]) -> None:
    penstock("topics", *arguments, code=2)


def test_without_the_packages_of_the_client_a_command_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['httpx'] = None; from penstock.cli.main import main; main(['topics', 'ls'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == b"error: this command needs the package httpx: pip install 'penstock[topics]'\n"


def test_errors_come_with_a_hint_and_a_code(server: Server) -> None:
    told = penstock("topics", "diff", "none", "--url", server.url, "--key", KEY, code=2)
    assert b'topic "none" does not exist' in told.stderr
    assert b"penstock topics ls" in told.stderr
    told = penstock("topics", "ls", "--url", server.url, "--key", "wrong", code=2)
    assert b"TOPICS_API_KEY" in told.stderr
    assert b"wrong" not in told.stderr
    told = penstock("topics", "ls", "--url", "http://127.0.0.1:1", "--retry-for", "100ms", code=3)
    assert b"no connection to http://127.0.0.1:1" in told.stderr


def test_a_keyed_write_survives_a_server_that_is_stopped_and_started(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as first:
        port = int(first.url.rpartition(":")[2])
        with first.client() as client:
            client.put_topic("t", FSYNC)
            client.write("t", [1])
    with Client(first.url, key=KEY, retry_deadline="20s") as client, serving(data, port):
        assert client.write("t", [2]).first_seq == 2
        assert [bytes(record.data) for record in client.diff("t").records()] == [b"1", b"2"]


def test_verify_names_the_file_and_the_bytes_that_were_damaged(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server, server.client() as client:
        client.write("t", [{"n": n} for n in range(100)])
        assert server_clean(data)
    assert server_clean(data)
    (stored,) = data.glob("topics/*/*.data")
    raw = bytearray(stored.read_bytes())
    raw[500] ^= 1
    stored.write_bytes(raw)
    told = json.loads(penstock("topics", "verify", data, "--json", code=5).stdout)
    (finding,) = told["findings"]
    assert finding["path"] == str(stored.relative_to(data))
    assert finding["start"] <= 500 < finding["end"]
    assert finding["topic"] == "t"
    assert b"1 problem found" in penstock("topics", "verify", data, code=5).stdout


@pytest.mark.parametrize("arguments", [["verify", "DIR"], ["backup", "DIR", "TARGET"]])
def test_a_directory_of_something_else_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    places = {"DIR": str(tmp_path), "TARGET": str(tmp_path.parent / "target")}
    told = penstock("topics", *(places.get(word, word) for word in arguments), code=2)
    assert (
        told.stderr
        == (
            f"error: {tmp_path} is not a data directory of topics; "
            "name the one given to the server (TOPICS_DATA_DIR)\n"
        ).encode()
    )
    places["DIR"] = str(tmp_path / "none")
    told = penstock("topics", *(places.get(word, word) for word in arguments), code=2)
    assert b"hint" not in told.stderr


def test_offline_commands_say_what_fits_them(tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "backup"
    with serving(data) as server, server.client() as client:
        client.write("t", [{"n": n} for n in range(100)])
        told = penstock("topics", "serve", given=b"", code=3, TOPICS_DATA_DIR=str(data), TOPICS_PORT="0")
        assert b"in use by process" in told.stderr
        assert b"hint" not in told.stderr
        told = penstock(
            "topics",
            "serve",
            given=b"",
            code=3,
            TOPICS_DATA_DIR=str(tmp_path / "other"),
            TOPICS_PORT=server.url.rpartition(":")[2],
        )
        assert b"hint" not in told.stderr
    penstock("topics", "backup", data, target)
    told = penstock("topics", "backup", data, target, code=2)
    assert b"not empty" in told.stderr
    assert b"hint" not in told.stderr
    stored = next(target.glob("topics/*/*.data"))
    stored.write_bytes(b"\xff" + stored.read_bytes()[1:])
    told = penstock("topics", "restore", target, tmp_path / "again", code=5)
    assert b"hint: keep the bytes; `penstock topics verify`" in told.stderr
    told = penstock("topics", "write", "t", "--file", tmp_path / "none", code=2)
    assert b"doctor" not in told.stderr


def test_verify_joins_what_was_lost_side_by_side(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server, server.client() as client:
        client.write("t", [{"n": n} for n in range(100)])
    (stored,) = data.glob("topics/*/*.data")
    stored.write_bytes(bytes(len(stored.read_bytes())))
    told = penstock("topics", "verify", data, code=5).stdout
    assert b"100 records cannot be read; the first: stored record 1" in told
    assert b"-> records 1 to 100 of t" in told
    assert b"1 problem found: 1 topic, 100 records in segments" in told


def test_old_segments_are_checked_and_backed_up_from_the_cold_tier(tmp_path: Path) -> None:
    data, cold, target = tmp_path / "data", tmp_path / "cold", tmp_path / "backup"
    small = {
        "TOPICS_SEGMENT_MAX_EVENTS": "20",
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_COLD_DIR": str(cold),
    }
    for _ in range(2):  # what one start has sealed, the stop of the next one moves
        with serving(data, **small) as server, server.client() as client:
            client.write("t", [{"n": n} for n in range(60)])
    assert list(cold.rglob("*.data"))
    told = penstock("topics", "verify", data).stdout
    assert b"records of t not checked: they are in the cold tier; give --cold" in told
    assert penstock("topics", "verify", data, "--cold", cold).stdout.startswith(
        b"clean: 1 topic, 120 records"
    )
    told = penstock("topics", "backup", data, target, code=2).stderr
    assert b"name it with --cold" in told
    penstock("topics", "backup", data, target, "--cold", cold)
    penstock("topics", "restore", target, tmp_path / "again")
    with serving(tmp_path / "again") as server, server.client() as client:
        assert client.state("t").count == 120


def server_clean(data: Path) -> bool:
    told = json.loads(penstock("topics", "verify", data, "--json").stdout)
    return bool(told["clean"])


def test_a_backup_of_a_running_server_restores_to_what_was_acknowledged(tmp_path: Path) -> None:
    data, target, again = tmp_path / "data", tmp_path / "backup", tmp_path / "again"
    small = {"TOPICS_SEGMENT_MAX_EVENTS": "50"}
    with serving(data, **small) as server, server.client() as client:
        client.put_topic("t", FSYNC)
        client.write("t", [{"n": n} for n in range(120)], tag="x")
        client.delete("t", before_seq=10)
    with serving(data, **small) as server, server.client() as client:
        client.write("t", [{"n": n} for n in range(120, 200)])
        client.write("u", [1, 2, 3])
        told = json.loads(penstock("topics", "backup", data, target, "--json").stdout)
        assert told["files"] > 0
        penstock("topics", "restore", target, data, code=3)
        client.write("t", ["after the backup"])
    penstock("topics", "restore", target, data, code=2)
    penstock("topics", "restore", target, again)
    with serving(again) as server, server.client() as client:
        state = client.state("t")
        assert (state.head_seq, state.count, state.earliest_seq) == (200, 191, 10)
        numbers: list[object] = []
        at = 9
        while at < 200:
            page = client.diff("t", at, limit=1000)
            numbers += [json.loads(bytes(record.data))["n"] for record in page.records()]
            at = page.next_from_seq
        assert numbers == list(range(9, 200))
        assert client.state("u").count == 3
    assert server_clean(again)


@pytest.mark.timeout(180)
def test_backups_taken_under_load_hold_every_write_acknowledged_before(tmp_path: Path) -> None:
    """A writer, deletions and checkpoints go on while backups are taken; each is restored and checked."""
    data = tmp_path / "data"
    with serving(data, TOPICS_SEGMENT_MAX_EVENTS="500") as server, server.client() as client:
        writer = subprocess.Popen(
            command("topics", "write", "load", "--batch-records", "100", "--url", server.url),
            env=environment(TOPICS_API_KEY=KEY),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        assert writer.stdin is not None
        client.put_topic("load", FSYNC)
        client.put_topic("acked", FSYNC)
        try:
            for attempt in range(3):
                for number in range(20):
                    writer.stdin.write(b'{"text": "some record of the load"}\n' * 500)
                    writer.stdin.flush()
                    client.write("acked", [[attempt, number]])
                acked = client.state("acked").head_seq
                target = tmp_path / f"backup-{attempt}"
                penstock("topics", "backup", data, target)
                penstock("topics", "restore", target, tmp_path / f"again-{attempt}")
                with serving(tmp_path / f"again-{attempt}") as restored, restored.client() as copy:
                    assert copy.state("acked").count >= acked
                    assert copy.state("load").count == copy.state("load").head_seq
        finally:
            writer.stdin.close()
            writer.send_signal(signal.SIGTERM)
            writer.wait(timeout=30)
