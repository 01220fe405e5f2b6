"""§11 and the lock of §12.2: the start of a server, and the reasons to refuse it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.contract.topics_server import environment, launch, run_refused, serving


def test_the_port_file_holds_the_address_and_no_other_file_remains(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        host, port = server.host_and_port
        assert (host, server.address) == ("127.0.0.1", f"127.0.0.1:{port}")
        assert port not in (0, 4000)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["data", "data.log", "data.port"]


def test_a_host_with_a_port_is_a_whole_address(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with serving(tmp_path / "data", TOPICS_HOST=f"127.0.0.1:{port}", TOPICS_PORT="1") as server:
        assert server.address == f"127.0.0.1:{port}"


def test_invalid_numbers_with_a_default_take_it_and_others_are_read(tmp_path: Path) -> None:
    with serving(
        tmp_path / "data",
        TOPICS_WAL_SHARDS="many",
        TOPICS_MAX_TOPICS="0",
        TOPICS_SEGMENT_MAX_AGE_MS="0",
        TOPICS_COLD_DIR=str(tmp_path / "cold"),
        TOPICS_HOT_RETAIN_SEGMENTS="1",
    ) as server:
        assert server.api().write("x", 1)["seqs"] == [1]


def test_a_reachable_bind_is_allowed_explicitly(tmp_path: Path) -> None:
    with serving(tmp_path / "data", TOPICS_HOST="0.0.0.0", TOPICS_ALLOW_INSECURE_NO_AUTH="1") as server:
        assert server.address.startswith("0.0.0.0:")


REFUSALS: dict[str, tuple[dict[str, str], str]] = {
    "every address without keys": ({"TOPICS_HOST": "0.0.0.0"}, "TOPICS_API_KEYS"),
    "every IPv6 address without keys": ({"TOPICS_HOST": "::"}, "TOPICS_API_KEYS"),
    "a name nobody knows without keys": ({"TOPICS_HOST": "no-such-host.invalid"}, "TOPICS_API_KEYS"),
    "a whole address without keys": ({"TOPICS_HOST": "0.0.0.0:0"}, "TOPICS_API_KEYS"),
    "an unknown scope": ({"TOPICS_API_KEYS": "secret:read+fly"}, "fly"),
    "a scope that is only a plus": ({"TOPICS_API_KEYS": "secret:+"}, "TOPICS_API_KEYS"),
    "a plus too many": ({"TOPICS_API_KEYS": "secret:read+"}, "TOPICS_API_KEYS"),
    "a key without a secret": ({"TOPICS_API_KEYS": ":read"}, "TOPICS_API_KEYS"),
    "a port that is none": ({"TOPICS_PORT": "http"}, "TOPICS_PORT"),
    "a store of an unknown kind": (
        {"TOPICS_COLD_DIR": "s4://bucket/cold"},
        "TOPICS_COLD_DIR: unknown scheme",
    ),
    "a cold store that is a file": ({"TOPICS_COLD_DIR": __file__}, "TOPICS_COLD_DIR"),
    "more logs than it can have": ({"TOPICS_WAL_SHARDS": "65"}, "TOPICS_WAL_SHARDS"),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of each refused start. They run concurrently: each waits for about a second."""
    folder = tmp_path_factory.mktemp("refused")
    said: dict[str, str] = {}

    def run(name: str, settings: dict[str, str]) -> None:
        said[name] = run_refused(folder / name, **settings)

    threads = [threading.Thread(target=run, args=(name, REFUSALS[name][0])) for name in REFUSALS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize("case", REFUSALS)
def test_a_start_is_refused_with_a_message(refusals: dict[str, str], case: str) -> None:
    assert case in refusals, "it did not refuse"
    assert REFUSALS[case][1] in refusals[case]
    assert "secret" not in refusals[case]


def test_a_second_server_on_the_same_data_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server:
        lock = data / ".topics.lock"
        assert lock.read_text().strip() == f"pid={server.process.pid}"
        said = run_refused(data, TOPICS_PORT_FILE=str(tmp_path / "second"))
        assert str(data) in said
        assert "listening" not in said
        assert not (tmp_path / "second").exists()
        assert lock.read_text().strip() == f"pid={server.process.pid}"
        assert server.api().write("x", 1)["seqs"] == [1]


def test_an_unknown_variable_is_logged_without_its_value(tmp_path: Path) -> None:
    known = {
        "TOPICS_MAX_ROUTERS": "1",
        "TOPICS_MAX_CLAIM": "1",
        "TOPICS_URL": "http://x",
        "TOPICS_API_KEY": "k",
    }
    with serving(tmp_path / "data", TOPICS_MAX_TOPIC="5432", **known) as server:
        told = [line for line in server.log.read_text().splitlines() if "WARNING" in line]
    assert len(told) == 1
    assert told[0].endswith(
        "TOPICS_MAX_TOPIC is set but is not a known variable; did you mean TOPICS_MAX_TOPICS?"
    )


def test_a_missing_package_is_named() -> None:
    program = (
        "import sys; sys.modules['h2.config'] = None; "
        "from penstock.cli.main import main; main(['topics', 'serve'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr == b"error: the server needs the package h2: pip install 'penstock[topics]'\n"


def test_the_lock_of_a_dead_server_does_not_block_a_start(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server:
        server.kill()
    with serving(data) as server:
        assert (data / ".topics.lock").read_text().strip() == f"pid={server.process.pid}"


def test_a_taken_port_is_refused_with_a_message(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in run_refused(tmp_path / "data", TOPICS_PORT=str(port))


def test_the_port_answers_while_the_log_is_replayed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server:
        api = server.api()
        for _ in range(12):
            api.write("x", *range(10_000))
        server.kill()
    server = launch(data)
    try:
        client = server.api().client
        progress: list[float] = []
        while (response := client.get("/v0/ready")).status_code != 200:
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            error = response.json()["error"]
            assert error["code"] == "not_ready"
            progress.append(error["detail"]["replay_progress"])
            assert client.get("/v0/health").json()["status"] == "ok"
            for path in ("/v0/topics/x", "/v0/topics"):
                answer = client.get(path)
                assert answer.status_code == 200 or answer.json()["error"]["code"] == "not_ready"
        assert progress, "the port must answer before the log is replayed"
        assert progress == sorted(progress)
        assert all(0 <= done <= 1 for done in progress)
        assert server.api().state("x")["count"] == 120_000
    finally:
        server.stop()
