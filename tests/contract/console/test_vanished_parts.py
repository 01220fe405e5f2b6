"""A part that is down is shown as down, not as zero, and the console recovers by itself."""

from __future__ import annotations

from typing import Any

import httpx
from tests.contract.console.conftest import StageProcess, eventually


def edge(console: httpx.Client, source: str, target: str) -> dict[str, Any]:
    found = console.get("overview").json()["flow"]["edges"]
    return next(one for one in found if (one["from"], one["to"]) == (source, target))


def state(console: httpx.Client, part: str) -> str:
    parts = console.get("overview").json()["parts"]
    return str(next(one["state"] for one in parts if one["name"] == part))


def last_step(console: httpx.Client, queue: str) -> str:
    step = console.get("trace", params={"buffer": queue, "sequence": "0"}).json()["steps"][-1]
    return f"{step['stage']}:{step['state']}"


def test_a_killed_topics_server_is_unknown_and_comes_back(console: httpx.Client, stage: StageProcess) -> None:
    eventually(lambda: edge(console, "clients", "topics")["known"])
    stage.order("kill topics")
    try:
        eventually(lambda: state(console, "topics") == "failed")
        down = edge(console, "clients", "topics")
        assert down["known"] is False
        assert (down["rate_records_s"], down["rate_bytes_s"], down["backlog"]) == (None, None, None)
        assert down["last_error"]
        assert edge(console, "topics", "queue:events")["backlog"] is None
        assert edge(console, "queue:events", "pipeline:events")["known"] is True
        answer = console.get("topics")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert console.get("buffers/events").status_code == 200
    finally:
        stage.order("start topics")
    eventually(lambda: edge(console, "clients", "topics")["known"])
    assert console.get("topics").status_code == 200


def test_a_killed_database_has_no_watermarks(console: httpx.Client, stage: StageProcess) -> None:
    stage.order("kill vector")
    try:
        eventually(lambda: state(console, "vector") == "failed")
        rows = {row["name"]: row for row in console.get("databases").json()}
        assert (rows["vector"]["watermarks"], rows["vector"]["state"]) == (None, "failed")
        assert rows["vector"]["feed"]["sequence"] is None
        assert rows["timeseries"]["watermarks"] is not None
        searched = console.post("databases/vector/search", json={"vector": [1, 0, 0]})
        assert searched.status_code == 503
        eventually(lambda: last_step(console, "vectors") == "database:unknown")
    finally:
        stage.order("start vector")
    eventually(lambda: state(console, "vector") == "ready")
