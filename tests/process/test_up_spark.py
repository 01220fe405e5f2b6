"""`penstock up` with nothing but defaults: an event written to a topic becomes a row of a table."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
import yaml
from deltalake import DeltaTable
from tests.process.cli_runner import penstock
from tests.process.java_children import java_of
from tests.process.up_process import ports_for, up

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def rows(table: Path) -> list[int]:
    if not DeltaTable.is_deltatable(str(table)):
        return []
    return sorted(DeltaTable(str(table)).to_pyarrow_table(columns=["seq"])["seq"].to_pylist())


def test_events_reach_the_table_once_though_the_driver_and_the_fleet_are_killed(tmp_path: Path) -> None:
    penstock("init", tmp_path)
    settings = yaml.safe_load((tmp_path / "penstock.yaml").read_text())
    wanted = {key: settings[key] for key in ("relays", "pipelines")} | {"topics": {}, "console": {}}
    wanted = ports_for(wanted, "console.port", "topics.port")
    table = tmp_path / "penstock-data" / "lake" / "events"
    written = 0

    def write(count: int) -> None:
        nonlocal written
        records = [{"data": {"n": number}} for number in range(count)]
        url = f"http://127.0.0.1:{wanted['topics']['port']}/v0/topics/events"  # type: ignore[index]
        assert httpx.post(url, json={"records": records}).status_code == 200
        written += count

    with up(tmp_path, wanted) as fleet:
        fleet.until_ready(240)
        write(100)
        fleet.until(lambda: len(rows(table)) >= 1, "in the table", 120)
        write(100)
        before = fleet.pids()
        os.kill(before["pipeline-events"], signal.SIGKILL)
        write(100)
        fleet.until(lambda: fleet.parts()["pipeline-events"]["restarts"] == 1, "started again")
        fleet.until_ready(240)
        assert fleet.pids()["topics"] == before["topics"]
        write(100)
        os.kill(fleet.process.pid, signal.SIGKILL)
        fleet.process.wait()
    with up(tmp_path, wanted) as fleet:
        fleet.until_ready(240)
        write(100)
        fleet.until(lambda: len(rows(table)) >= written, "in the table", 120)
        assert fleet.stop() == 0
    assert rows(table) == list(range(1, written + 1))


def test_what_killed_java_is_the_last_error_of_its_pipeline(tmp_path: Path) -> None:
    """In the log, in the status and in the console, and no trace that Spark prints because of it."""
    penstock("init", tmp_path)
    settings = yaml.safe_load((tmp_path / "penstock.yaml").read_text())
    wanted = {key: settings[key] for key in ("relays", "pipelines")} | {"topics": {}, "console": {}}
    wanted = ports_for(wanted, "console.port", "topics.port")
    name = "pipeline-events"
    # PySpark's own workers leave files open.
    with up(tmp_path, wanted, PYTHONWARNINGS="ignore") as fleet:
        fleet.until(lambda: name in fleet.pids() and bool(fleet.consoles()), "started")
        first = java_of(fleet.pids()[name])
        with fleet.session() as console:

            def last_error() -> str:
                parts = console.get("/console/api/overview").json()["parts"]
                (found,) = (part["last_error"] for part in parts if part["name"] == name)
                return str(found)

            os.kill(first, signal.SIGKILL)
            sentence = "Spark's Java was killed by signal 9 before Spark was ready"
            fleet.until(lambda: last_error().startswith(sentence), "reported")

            fleet.until_ready(400)
            url = f"http://127.0.0.1:{wanted['topics']['port']}/v0/topics/events"  # type: ignore[index]
            assert httpx.post(url, json={"records": [{"data": {"n": 1}}]}).status_code == 200
            fleet.until(
                lambda: rows(tmp_path / "penstock-data" / "lake" / "events") == [1], "in the table", 240
            )
            os.kill(java_of(fleet.pids()[name], other_than=first), signal.SIGKILL)
            sentence = "Spark's Java was killed by signal 9 while it was working"
            fleet.until(lambda: last_error().startswith(sentence), "reported")
            fleet.until(lambda: fleet.parts()[name]["state"] == "not_ready", "not ready")
            fleet.until_ready(400)
            assert last_error().startswith(sentence)

        assert fleet.parts()[name]["restarts"] == 0  # it has started Java again by itself
        assert str(fleet.parts()[name]["last_error"]).startswith(sentence)
        errors = [line for line in fleet.lines if line.get("part") == name and line.get("level") == "error"]
        assert errors
        assert all("killed by signal 9" in str(line["message"]) for line in errors), errors
        assert fleet.stop() == 0
