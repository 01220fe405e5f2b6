"""`penstock buffer …` as a person or a script runs it: real processes, real directories."""

from __future__ import annotations

import base64
import json
import os
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest
from tests.process.cli_runner import command, environment, penstock

from penstock.buffer import ConsumerConfig
from penstock.buffer import manifest as manifests
from penstock.buffer.sync import Consumer


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    """A queue with one batch of three records."""
    store = tmp_path / "store"
    penstock("buffer", "produce", store, "--metadata", "hello", given=b"a\nb\nc\n")
    return store


def the_batch(store: Path) -> Path:
    (batch,) = (store / "ingest").glob("*.batch")
    return batch


def test_produce_accounts_for_every_line_and_tail_prints_them(tmp_path: Path) -> None:
    told = penstock("buffer", "produce", tmp_path, "--json", given=b"a\n\nlast")
    account = json.loads(told.stdout)
    assert (account["accepted"], account["durable"], account["not_durable"]) == (3, 3, 0)
    assert account["sequences"] == [{"folder": "ingest", "first": 0, "last": 0}]
    assert penstock("buffer", "tail", tmp_path, "--raw").stdout == b"a\n\nlast\n"


def test_produce_reads_a_file_with_length_prefixes(tmp_path: Path) -> None:
    records = [b"one\ntwo", b"", b"\xff\0"]
    source = tmp_path / "input"
    source.write_bytes(b"".join(struct.pack("<I", len(record)) + record for record in records))
    store = tmp_path / "store"
    penstock(
        "buffer",
        "produce",
        store,
        "--file",
        source,
        "--delimiter",
        "length-prefixed",
        "--compression",
        "zstd",
    )
    dumped = json.loads(penstock("buffer", "dump", store, "--batch", "0").stdout)
    assert [base64.b64decode(record) for record in dumped["records"]] == records
    assert (dumped["record_count"], dumped["compression"]) == (3, "zstd")


def test_input_that_is_cut_short_keeps_what_came_before_and_says_so(tmp_path: Path) -> None:
    run = penstock(
        "buffer",
        "produce",
        tmp_path,
        "--delimiter",
        "length-prefixed",
        given=b"\x01\0\0\0a\x09\0\0\0b",
        code=2,
    )
    assert b"durable    1 records" in run.stdout
    assert b"ends inside a record" in run.stderr


def test_nothing_in_nothing_out(tmp_path: Path) -> None:
    assert b"accepted  0 records" in penstock("buffer", "produce", tmp_path, given=b"").stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_makes_produce_flush_what_it_accepted_and_report(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        command("buffer", "produce", tmp_path, "--json"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Long enough that only the flush at the end can have stored the records.
        env=environment(PENSTOCK_BUFFER__FLUSH_INTERVAL="60s", PENSTOCK_BUFFER__FLUSH_SIZE_BYTES="1MB"),
    )
    assert process.stdin is not None
    # More than the size of a batch: its object appears when the lines before are being taken in.
    process.stdin.write(b"x" * 999_999 + b"\n" + b"a\nb\nunfinished")
    process.stdin.flush()
    while not list(tmp_path.glob("ingest/*.batch")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.wait(30) == code
    output, complaint = process.stdout.read(), process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    account = json.loads(output)
    assert account["accepted"] == account["durable"] >= 1
    assert account["stopped_by"] == number.name
    assert number.name.encode() in complaint
    assert len(penstock("buffer", "tail", tmp_path, "--raw").stdout.splitlines()) == account["durable"]


def test_records_that_are_not_durable_are_counted_and_set_the_exit_code(tmp_path: Path) -> None:
    penstock("buffer", "produce", tmp_path, given=b"a\n")
    (tmp_path / "ingest" / "manifest.floor").write_bytes(b"damaged")
    impatient = {"PENSTOCK_BUFFER__APPEND_DEADLINE": "1s"}
    run = penstock("buffer", "produce", tmp_path, given=b"b\nc\n", code=1, **impatient)
    assert b"2 of 2 accepted records are not durable" in run.stderr
    assert b"floor is damaged" in run.stderr
    assert penstock("buffer", "tail", tmp_path, "--raw").stdout == b"a\n"


def test_reading_stops_at_the_first_failure_and_says_from_where_on(tmp_path: Path) -> None:
    penstock("buffer", "produce", tmp_path, given=b"a\n")
    (tmp_path / "ingest" / "manifest.floor").write_bytes(b"damaged")
    endless = b"0123456789\n" * 1_000_000
    impatient = {"PENSTOCK_BUFFER__APPEND_DEADLINE": "1s", "PENSTOCK_BUFFER__MAX_INFLIGHT_BYTES": "1MB"}
    run = penstock("buffer", "produce", tmp_path, "--json", given=endless, code=1, **impatient)
    account = json.loads(run.stdout)
    assert account["durable"] == 0
    assert 0 < account["accepted"] == account["not_durable"] < 1_000_000
    assert account["first_not_durable"] == 0
    assert b"all records before number 0" in run.stderr


def test_sharded_records_go_by_key_and_stat_shows_each_shard(tmp_path: Path) -> None:
    lines = b"".join(b"key%d,%d\n" % (number % 5, number) for number in range(50))
    penstock("buffer", "produce", tmp_path, "--shards", "3", "--key-separator", ",", given=lines)
    penstock("buffer", "produce", tmp_path, "--key", "key1", given=b"key1,more\n")
    shown = [json.loads(line) for line in penstock("buffer", "tail", tmp_path, "--json").stdout.splitlines()]
    places: dict[bytes, set[int]] = {}
    for item in shown:
        key = base64.b64decode(item["record_base64"]).partition(b",")[0]
        places.setdefault(key, set()).add(item["shard"])
    assert len(shown) == 51
    assert {len(shards) for shards in places.values()} == {1}
    table = penstock("buffer", "stat", tmp_path).stdout.decode().splitlines()
    assert [line.split()[0] for line in table[1:]] == ["shard", "0000", "0001", "0002", "total"]
    assert len({len(line) for line in table[1:]}) == 1
    penstock("buffer", "fsck", tmp_path, "--deep")
    assert b"choose one with --shard" in penstock("buffer", "dump", tmp_path, code=1).stderr
    plain = penstock("buffer", "produce", tmp_path / "new", "--key", "k", given=b"k\n", code=2)
    assert b"not sharded" in plain.stderr


def test_tail_shows_where_when_and_with_what(queue: Path) -> None:
    lines = penstock("buffer", "tail", queue, "--from", "0", "-n", "2").stdout.decode().splitlines()
    places = [line.split("\t") for line in lines]
    assert [(place[0], place[2], place[3]) for place in places] == [
        ("0:0", "hello", "a"),
        ("0:1", "hello", "b"),
    ]
    assert places[0][1].endswith("Z")
    assert penstock("buffer", "tail", queue, "--from", "latest").stdout == b""
    assert b"\t61\n" in penstock("buffer", "tail", queue, "--hex").stdout


def test_tail_follows_what_is_appended(queue: Path) -> None:
    with subprocess.Popen(
        command("buffer", "tail", queue, "-f", "-n", "4", "--raw"),
        stdout=subprocess.PIPE,
        env=environment(),
    ) as following:
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in range(3)] == [b"a\n", b"b\n", b"c\n"]
        penstock("buffer", "produce", queue, given=b"d\n")
        assert following.stdout.readline() == b"d\n"
        assert following.wait(30) == 0


def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path) -> None:
    penstock("buffer", "produce", tmp_path, given=b"x\n" * 200_000)
    with subprocess.Popen(
        command("buffer", "tail", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        tail.stdout.readline()
        tail.stdout.close()
        assert tail.stderr.read() == b""
        assert tail.wait(30) == 0


def test_looking_never_fences_the_consumer(queue: Path) -> None:
    with Consumer.open(ConsumerConfig(store=str(queue), gc_enabled=False)) as consumer:
        for verb in ("tail", "stat", "dump", "fsck", "gc"):
            penstock("buffer", verb, queue)
        batch = consumer.next_batch()
        assert batch is not None
        consumer.ack(batch.sequence)
    assert b"- (empty)" in penstock("buffer", "stat", queue).stdout


def test_stat_shows_length_lag_and_garbage(queue: Path) -> None:
    (found,) = json.loads(penstock("buffer", "stat", queue, "--json").stdout)["queues"]
    assert (found["queue_length"], found["first_sequence"], found["next_sequence"]) == (1, 0, 1)
    assert found["ingestion_lag_ms"] >= 0
    assert found["data_bytes"] == the_batch(queue).stat().st_size
    text = penstock("buffer", "stat", queue).stdout.decode()
    assert "1 batch\n" in text
    assert "(no consumer yet)" in text


def test_dump_prints_exactly_the_agreed_object_from_a_store_and_from_a_file(queue: Path) -> None:
    dumped = json.loads(penstock("buffer", "dump", queue).stdout)
    decoded = manifests.decode_manifest((queue / "ingest" / "manifest").read_bytes())
    (meta,) = decoded.entries[0].metadata
    assert dumped == {
        "version": 1,
        "epoch": 0,
        "next_sequence": 1,
        "entries": [
            {
                "sequence": 0,
                "location": f"ingest/{the_batch(queue).name}",
                "metadata": [
                    {
                        "start_index": 0,
                        "ingestion_time_ms": meta.ingestion_time_ms,
                        "payload_base64": base64.b64encode(b"hello").decode(),
                    }
                ],
            }
        ],
    }
    assert json.loads(penstock("buffer", "dump", queue / "ingest" / "manifest").stdout) == dumped
    by_key = json.loads(
        penstock("buffer", "dump", queue, "--batch", f"ingest/{the_batch(queue).name}").stdout
    )
    assert by_key["records"] == ["YQ==", "Yg==", "Yw=="]


def test_dump_ends_with_1_on_any_error(queue: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"short")
    assert b"shorter than its 22-byte footer" in penstock("buffer", "dump", damaged, code=1).stderr
    assert b"no directory" in penstock("buffer", "dump", tmp_path / "none", code=1).stderr
    assert b"no manifest other" in penstock("buffer", "dump", queue, "--manifest", "other", code=1).stderr
    assert b"holds 0 to 0" in penstock("buffer", "dump", queue, "--batch", "5", code=1).stderr
    assert b"no batch ingest/x" in penstock("buffer", "dump", queue, "--batch", "ingest/x", code=1).stderr


def test_fsck_finds_damage_says_what_to_do_and_touches_nothing(queue: Path) -> None:
    assert penstock("buffer", "fsck", queue, "--deep").stdout.startswith(b"clean")
    os.truncate(the_batch(queue), 20)
    penstock("buffer", "fsck", queue)
    damaged = penstock("buffer", "fsck", queue, "--deep", code=1).stdout
    assert b"damaged" in damaged
    assert b"-> restore" in damaged
    assert penstock("buffer", "tail", queue, code=5).stdout == b""
    the_batch(queue).unlink()
    findings = json.loads(penstock("buffer", "fsck", queue, "--json", code=1).stdout)
    assert findings["clean"] is False
    (queue / "ingest" / "manifest").write_bytes(b"damaged, and longer than a footer")
    assert b"restore an older version" in penstock("buffer", "fsck", queue, code=1).stdout
    assert b"error: " in penstock("buffer", "stat", queue, code=5).stderr


def test_gc_withholds_what_is_not_sealed_and_fences_only_on_request(queue: Path) -> None:
    with Consumer.open(ConsumerConfig(store=str(queue), gc_enabled=False)) as consumer:
        batch = consumer.next_batch()
        assert batch is not None
        consumer.ack_through(batch.sequence)
        plan = penstock("buffer", "gc", queue, "--grace", "0s", "--dry-run").stdout
        assert b"would delete 0" in plan
        assert b"withheld 1" in plan
        spared = penstock("buffer", "gc", queue, "--grace", "0s").stdout
        assert b"deleted 0" in spared
        assert b"--fence does it now" in spared
        assert the_batch(queue).exists()
        refused = penstock("buffer", "gc", queue, "--grace", "0s", "--fence", given=b"n\n", code=1)
        assert b"nothing was changed" in refused.stderr
        assert consumer.next_batch() is None
    report = json.loads(penstock("buffer", "gc", queue, "--grace", "0s", "--fence", "--yes", "--json").stdout)
    assert len(report["queues"][0]["deleted"]) == 1
    assert not list((queue / "ingest").glob("*.batch"))
    assert b"garbage" in penstock("buffer", "gc", queue).stdout


@pytest.mark.parametrize("verb", ["tail", "stat", "fsck", "gc"])
def test_a_directory_that_is_not_there_is_an_error_and_is_not_made(verb: str, tmp_path: Path) -> None:
    run = penstock("buffer", verb, tmp_path / "none", code=2)
    assert run.stderr.startswith(b"error: there is no directory")
    assert not (tmp_path / "none").exists()
    assert b"nothing was produced there" in penstock("buffer", verb, tmp_path, code=2).stderr


def test_wrong_addresses_and_settings_are_reported_in_one_line(queue: Path, tmp_path: Path) -> None:
    assert b"did you mean s3://" in penstock("buffer", "stat", "s4://bucket", code=2).stderr
    settings = tmp_path / "queue.yaml"
    settings.write_text(f"store: {queue}\nmanifest_pth: x\n", encoding="utf-8")
    run = penstock("buffer", "stat", "--config", settings, code=2)
    assert b"did you mean 'manifest_path'" in run.stderr
    assert b"Missing argument 'STORE'" in penstock("buffer", "stat", code=2).stderr
    settings.write_text(f"store: {queue}\n", encoding="utf-8")
    penstock("buffer", "stat", "--config", settings)
    penstock("buffer", "stat", PENSTOCK_BUFFER__STORE=str(queue))


def test_a_store_that_does_not_answer_is_3_and_secrets_are_not_shown() -> None:
    options = ["endpoint=http://127.0.0.1:9", "allow_http=true", "region=x", "access_key_id=hunter1"]
    flags = [
        flag for option in [*options, "secret_access_key=hunter2"] for flag in ("--store-option", option)
    ]
    impatient = {"PENSTOCK_BUFFER__APPEND_DEADLINE": "1s"}
    run = penstock("buffer", "produce", "s3://bucket", *flags, given=b"a\n", code=3, **impatient)
    assert b"no record was accepted" in run.stderr
    assert b"hunter" not in run.stderr + run.stdout


def test_collecting_the_outer_queue_leaves_the_unread_batches_of_an_inner_one(tmp_path: Path) -> None:
    inner = ("--prefix", "ingest/eu", "--manifest", "ingest/eu/manifest")
    penstock("buffer", "produce", tmp_path, given=b"outer\n")
    penstock("buffer", "produce", tmp_path, *inner, given=b"inner\n")
    (batch,) = (tmp_path / "ingest").glob("*.batch")
    long_ago = time.time() - 86_400
    for stored in (tmp_path / "ingest").rglob("*.batch"):
        os.utime(stored, (long_ago, long_ago))
    with Consumer.open(ConsumerConfig(store=str(tmp_path), gc_enabled=False)) as consumer:
        assert consumer.next_batch() is not None
        consumer.ack(0)
    penstock("buffer", "gc", tmp_path, "--grace", "0s", "--fence", "--yes")
    assert not batch.exists()
    assert penstock("buffer", "tail", tmp_path, *inner, "--raw").stdout == b"inner\n"
