"""The redrive button: it asks for confirmation, runs the command once, and reports the result."""

from __future__ import annotations

from typing import Any

import httpx
from tests.contract.console.conftest import eventually

PATH = "pipelines/events/redrive"


def jobs(console: httpx.Client) -> list[dict[str, Any]]:
    return list(console.get(PATH).json())


def letters(console: httpx.Client) -> dict[str, bool]:
    found = console.get("pipelines/events/dead-letters").json()["letters"]
    return {letter["position"]: letter["redriven"] for letter in found}


def test_a_redrive_requires_confirmation(console: httpx.Client) -> None:
    for body in ({}, {"confirm": False}):
        answer = console.post(PATH, json=body)
        assert answer.status_code == 400
        assert "confirm" in answer.json()["error"]["message"]
    assert console.post(PATH, json={"confirm": True, "positions": ["0:0:-1"]}).status_code == 400
    assert console.post(PATH, json={"confirm": True, "positions": ["--help"]}).status_code == 400
    assert console.post(PATH, json={"confirm": True, "positions": []}).status_code == 400
    assert console.post(PATH, json={"confirm": True, "reason": "a\0b"}).status_code == 400
    assert jobs(console) == []


def test_chosen_letters_go_back_once_and_one_redrive_runs_at_a_time(console: httpx.Client) -> None:
    begun = console.post(PATH, json={"confirm": True, "positions": ["0:0:7", "0:1:7"]})
    assert begun.status_code == 202
    job = begun.json()
    assert (job["state"], job["pipeline"]) == ("running", "events")
    second = console.post(PATH, json={"confirm": True})
    assert (second.status_code, second.json()["error"]["code"]) == (409, "conflict")
    eventually(lambda: jobs(console)[0]["state"] != "running", within_s=60)
    ended = jobs(console)[0]
    assert (ended["id"], ended["state"], ended["error"]) == (job["id"], "done", None)
    assert ended["result"]["redriven"]["records"] == 2
    eventually(lambda: letters(console)["0:0:7"])
    assert letters(console)["0:0:17"] is False
