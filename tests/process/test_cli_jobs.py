"""`penstock topics claim|ack|nack|extend` as a person or a script runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.process.cli_runner import command, environment, penstock
from tests.process.topics_server import KEY, Server, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "data") as running:
        yield running


def claimed(server: Server, *options: str) -> list[dict[str, object]]:
    told = server.run("claim", "mails", "--json", *options)
    return [json.loads(line) for line in told.splitlines()]


def test_jobs_are_claimed_given_back_extended_and_done(server: Server) -> None:
    made = server.json(
        "put",
        "mails",
        *("--type", "queue", "--lease", "10m", "--max-deliveries", "3", "--dead-letter", "dead"),
        *("--claim-jitter", "0s", "--leases-durable"),
    )["config"]
    assert isinstance(made, dict)
    assert (made["lease_ms"], made["max_deliveries"], made["dead_letter"]) == (600_000, 3, "dead")
    assert made["leases_durable"]
    server.run("write", "mails", given=b'{"to": 1}\n{"to": 2}\n{"to": 3}\n')
    jobs = claimed(server, "--node", "w", "--max", "2")
    assert [(job["$seq"], job["data"]) for job in jobs] == [(1, {"to": 1}), (2, {"to": 2})]
    refs = [f"{job['$seq']}:{job['lease_id']}" for job in jobs]
    held = server.json("extend", "mails", refs[0], "--node", "w", "--lease", "1h")["deadlines_ms"]
    assert isinstance(held, dict)
    assert held["1"] > int(str(jobs[0]["deadline"]))
    assert b"returned: 1 job" in server.run("nack", "mails", "2", "--node", "w", "--delay", "1h")
    done = server.json("ack", "mails", *refs, "--node", "w", code=2)
    assert (done["acked"], done["skipped"], done["ready"]) == (1, [2], 1)
    assert b"1 ready, 0 held" in server.run("stat", "mails")
    assert b"3:lease_3" in server.run("claim", "mails", "--node", "w")
    assert server.run("claim", "mails", "--node", "w") == b""


def test_contradictory_options_are_reported(server: Server) -> None:
    server.run("write", "log", given=b"1\n")
    server.run("claim", "log", code=2)
    server.run("ack", "none", "1", code=2)
    server.run("ack", "log", "x", code=2)
    server.run("ack", "log", "1:", code=2)
    server.run("ack", "log", code=2)
    server.run("nack", "log", "1", "--delay", "soon", code=2)
    server.run("extend", "log", "1", code=2)


def test_a_command_runs_for_every_job_and_what_fails_comes_again(server: Server, tmp_path: Path) -> None:
    """The second job fails once; in the end each was done once."""
    server.run("put", "mails", "--type", "queue", "--lease", "300ms")
    server.run("write", "mails", "--tag", "t", given=b'{"n":1}\n{"n":2}\n{"n":3}\n')
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys, time, pathlib\n"
        "text = sys.stdin.read()\n"
        "seq, delivery = os.environ['JOB_SEQ'], os.environ['JOB_DELIVERIES']\n"
        "time.sleep(0.5 if seq == '1' else 0)\n"  # longer than the lease
        "if seq == '2' and delivery == '1': sys.exit(3)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'done-{{seq}}-{{delivery}}').write_text(text)\n"
    )
    options = ["--url", server.url, "--json", "--max", "2", "--drain"]
    command = ["--", sys.executable, str(script)]
    tally = json.loads(penstock("topics", "work", "mails", *options, *command, TOPICS_API_KEY=KEY).stdout)
    assert tally == {"done": 3, "failed": 1, "lost": 0}
    done = {path.name: path.read_text() for path in tmp_path.glob("done-*")}
    assert done == {"done-1-1": '{"n":1}\n', "done-2-2": '{"n":2}\n', "done-3-1": '{"n":3}\n'}


# ---- what goes wrong, and how it ends ----------------------------------------------------------------


@contextmanager
def working(server: Server, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`penstock topics work mails` in a process group of its own, as in a terminal."""
    worker = subprocess.Popen(
        command("topics", "work", "mails", "--url", server.url, "--json", *arguments),
        env=environment(TOPICS_API_KEY=KEY),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield worker
    finally:
        if worker.poll() is None:
            worker.kill()
        worker.communicate(timeout=20)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ready_and_held(server: Server) -> tuple[int, int]:
    with server.client() as client:
        counts = client.state("mails").queue
        assert counts is not None
        return counts.ready, counts.in_flight


def test_a_missing_command_is_reported_before_a_job_is_claimed(server: Server) -> None:
    server.run("put", "mails", "--type", "queue")
    server.run("write", "mails", given=b"1\n")
    options = ["--url", server.url, "--drain"]
    told = penstock("topics", "work", "mails", *options, "no-such-command", code=2, TOPICS_API_KEY=KEY)
    assert told.stderr.count(b"\n") == 1
    assert b"no-such-command" in told.stderr
    assert b'"deliveries":1,' in server.run("claim", "mails", "--json").replace(b" ", b"")


def test_a_command_that_cannot_be_run_is_reported_and_its_job_is_returned(
    server: Server, tmp_path: Path
) -> None:
    """It may be executed, says its file, but what shall execute it is not there."""
    server.run("put", "mails", "--type", "queue", "--lease", "10m")
    server.run("write", "mails", given=b"1\n")
    script = tmp_path / "job"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with working(server, str(script)) as worker:
        _, stderr = worker.communicate(timeout=20)
        assert worker.returncode == 2
        assert stderr.count(b"\n") == 1
        assert str(script).encode() in stderr
    until(lambda: ready_and_held(server) == (1, 0))


def test_a_drain_waits_for_jobs_that_are_delayed(server: Server) -> None:
    server.run("put", "mails", "--type", "queue")
    server.run("write", "mails", given=b"1\n2\n")
    script = "import os, sys; sys.exit(os.environ['JOB_DELIVERIES'] == '1')"
    with working(server, "--drain", "--delay", "1s", "--", sys.executable, "-c", script) as worker:
        told, _ = worker.communicate(timeout=20)
    assert json.loads(told) == {"done": 2, "failed": 2, "lost": 0}


def test_the_first_interrupt_waits_for_the_command_and_the_second_does_not(
    server: Server, tmp_path: Path
) -> None:
    server.run("put", "mails", "--type", "queue", "--lease", "10m")
    server.run("write", "mails", given=b"1\n2\n")
    started, go = tmp_path / "started", tmp_path / "go"
    script = f"touch {started}; while [ ! -e {go} ]; do sleep 0.05; done"
    with working(server, "--", "sh", "-c", script) as worker:
        until(started.exists)
        os.killpg(worker.pid, signal.SIGINT)
        time.sleep(0.5)
        assert worker.poll() is None
        go.touch()
        told, stderr = worker.communicate(timeout=20)
        assert (worker.returncode, json.loads(told)) == (0, {"done": 1, "failed": 0, "lost": 0}), stderr
    until(lambda: ready_and_held(server) == (1, 0))
    started.unlink()
    go.unlink()
    with working(server, "--", "sh", "-c", script) as worker:
        until(started.exists)
        os.killpg(worker.pid, signal.SIGINT)
        time.sleep(0.2)
        os.killpg(worker.pid, signal.SIGINT)
        _, stderr = worker.communicate(timeout=20)
        assert worker.returncode == 130
        assert b"Traceback" not in stderr
    until(lambda: ready_and_held(server) == (1, 0))


def test_a_command_is_stopped_when_its_lease_cannot_be_extended(server: Server, tmp_path: Path) -> None:
    server.run("put", "mails", "--type", "queue")
    server.run("write", "mails", given=b"1\n")
    started, ended = tmp_path / "started", tmp_path / "ended"
    script = f"touch {started}; sleep 5; touch {ended}"
    with working(server, "--lease", "600ms", "--retry-for", "1s", "--", "sh", "-c", script) as worker:
        until(started.exists)
        server.process.kill()
        _, stderr = worker.communicate(timeout=20)
        assert worker.returncode == 3
        assert b"job 1 could not be held" in stderr
        assert b"Traceback" not in stderr
        assert b"never retrieved" not in stderr
    assert not ended.exists()


def test_the_help_says_how_to_give_a_command_with_options() -> None:
    told = penstock("topics", "work", "--help").stdout
    assert b"[--] COMMAND..." in told
    assert b"Put -- before a COMMAND" in told
    assert b"no job ready, held or delayed" in b" ".join(told.split())
