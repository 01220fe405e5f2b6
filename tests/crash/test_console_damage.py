"""The sessions of a console, damaged in every way: a browser is known or needs a new token."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.crash.damage import Tally, damages
from tests.unit.console.test_sessions import access, begun

from penstock.console.access import Access
from penstock.http.errors import Unauthorized
from penstock.http.message import Request
from penstock.testing.clock import ManualClock

pytestmark = pytest.mark.crash

FILE = "console-sessions.json"


def knows(door: Access, request: Request) -> bool:
    try:
        door.principal(request)
    except Unauthorized:
        return False
    return True


def test_damage_to_the_sessions_of_a_console_costs_a_token_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / FILE, ManualClock()
    door = access(path, clock)
    requests, copies = [], []
    for _ in range(3):
        requests.append(begun(door))
        copies.append(path.read_bytes())
    stranger = begun(access(tmp_path / "other", clock))
    tally = Tally("Machine")
    for damage in damages(FILE, copies[-1], copies[:-1]):
        path.unlink(missing_ok=True)
        if damage.data is not None:
            path.write_bytes(damage.data)
        caplog.clear()
        door = access(path, clock)
        known = [knows(door, request) for request in requests]
        is_told = any(one.levelno >= logging.WARNING for one in caplog.records)
        wrong = None
        if knows(door, stranger):
            wrong = "somebody who had no session is let in"
        elif not all(known) and not is_told and (damage.how.startswith(("trunc", "zero"))):
            wrong = "sessions are gone without a word"
        outcome = "complete" if all(known) else "reported" if is_told else "needs a new token"
        tally.note(damage, outcome if wrong is None else "wrong", wrong)
    tally.finish()
    assert tally.outcomes["complete"] == 0
