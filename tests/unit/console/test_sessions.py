"""Sessions of a console without keys: started with a token, valid for a day, even over a restart."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from penstock.console.access import Access
from penstock.http.auth import Keyring
from penstock.http.errors import Unauthorized
from penstock.http.message import Request
from penstock.testing.clock import ManualClock

DAY_S = 24 * 3600.0


def access(path: Path, clock: ManualClock, keys: str = "") -> Access:
    made = Access(
        Keyring.parse(keys, "KEYS"), clock, host="127.0.0.1", is_loopback=True, sessions_file=str(path)
    )
    made.bound(4600)
    return made


def begun(door: Access) -> Request:
    """Return a request with the cookie of a new session."""
    token = door.new_token()
    _, cookie = door.begin_session(Request(b"POST", b"/console/api/session", {}), token)
    return Request(b"GET", b"/console/api/overview", {b"cookie": cookie.partition(b";")[0]})


def test_a_session_outlives_the_process_it_began_in(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "sessions.json"
    request = begun(access(path, clock))
    access(path, clock).principal(request)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert request.headers[b"cookie"].partition(b"=")[2] not in path.read_bytes()


async def test_a_session_of_yesterday_has_expired(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "sessions.json"
    request = begun(access(path, clock))
    await clock.advance(DAY_S)
    with pytest.raises(Unauthorized):
        access(path, clock).principal(request)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", bytes(40), b'{"zz": 1}', b'{"00": "x"}'])
def test_a_foreign_sessions_file_gives_no_access_and_is_reported(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = ManualClock(), tmp_path / "sessions.json"
    request = begun(access(path, clock))
    assert not caplog.records
    path.write_bytes(text)
    with pytest.raises(Unauthorized):
        access(path, clock).principal(request)
    [report] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert report.startswith(f"sessions in {path} cannot be read")


def test_a_missing_file_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    access(tmp_path / "sessions.json", ManualClock())
    assert not caplog.records


def test_with_keys_an_old_session_is_not_accepted(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "sessions.json"
    request = begun(access(path, clock))
    with pytest.raises(Unauthorized):
        access(path, clock, "a-key").principal(request)


def test_a_file_that_cannot_be_written_only_ends_the_session_with_the_process(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "missing" / "sessions.json"
    door = access(path, clock)
    request = begun(door)
    door.principal(request)
    with pytest.raises(Unauthorized):
        access(path, clock).principal(request)
