"""A relay that has nothing to do, and whoever watches it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.process.cli_runner import command, environment
from tests.process.topics_server import KEY, serving


def test_a_relay_without_work_sends_heartbeats(tmp_path: Path) -> None:
    with serving(tmp_path / "topics") as server:
        arguments = ("topics", "relay", "quiet", tmp_path / "store", "--create", "--events")
        relay = subprocess.Popen(
            command(*arguments, "--url", server.url),
            stdout=subprocess.PIPE,
            env=environment(TOPICS_API_KEY=KEY),
        )
        try:
            assert relay.stdout is not None
            told = [json.loads(relay.stdout.readline())["event"] for _ in range(3)]
            assert told == ["progress", "alive", "alive"]
        finally:
            relay.terminate()
            rest, _ = relay.communicate(timeout=20)
    assert json.loads(rest.splitlines()[-1])["event"] == "stopped"
    assert relay.returncode == 0
