"""What clients read of an error: no path of the server."""

from __future__ import annotations

import errno

import pytest

from penstock.collector.status import refusal_of
from penstock.console.app import refusal as console_refusal
from penstock.errors import InvalidInput, PenstockError, Unavailable, public_text
from penstock.servers.errors import response_to, told
from penstock.storage.fs import explain
from penstock.timeseries.api.answers import error_answer
from penstock.topics.errors import CommitFailed
from penstock.topics.write.pending import commit_error

ROOT = "/srv/data of ours/topics"
CODES = [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.ENOENT, errno.ENAMETOOLONG]


@pytest.mark.parametrize("code", CODES)
def test_no_server_names_the_file_that_a_system_call_failed_on(code: int) -> None:
    error = explain(OSError(code, "x"), f"{ROOT}/wal/wal-1.log", "write")
    assert ROOT in str(error)
    wrapped: PenstockError = CommitFailed(f"the log could not be written: {error}")
    wrapped.__cause__ = error
    for one in (error, wrapped, commit_error(error)):
        texts = [
            public_text(one),
            refusal_of(one).message,
            str(response_to(one).body),
            str(console_refusal(one).body),
            str(error_answer(one).body) if isinstance(one, Unavailable) else "",
        ]
        assert not [text for text in texts if "/srv" in text or "wal-1" in text]


def test_the_log_of_the_server_has_the_path(caplog: pytest.LogCaptureFixture) -> None:
    error = explain(OSError(errno.ENOSPC, "x"), f"{ROOT}/wal/wal-1.log", "write")
    response_to(error)
    told(error)
    assert [f"{ROOT}/wal/wal-1.log" in record.getMessage() for record in caplog.records] == [True, True]


def test_what_a_request_says_is_quoted_as_it_is() -> None:
    error = InvalidInput("'/etc/passwd' is not a topic name")
    assert public_text(error) == str(error)
    assert public_text(Unavailable("POST /v0/watch follows it")) == "POST /v0/watch follows it"


def test_a_path_that_is_not_declared_is_left_out_too() -> None:
    shown = public_text(Unavailable("key was not stored in file:///srv/x: cannot open /srv/x/y; try again"))
    assert shown == "key was not stored in a file of the server: cannot open a file of the server; try again"


@pytest.mark.parametrize(
    "path",
    ["path:/srv/x", "unix:/run/x", "at /v1data/x", "in /v2/files/wal-1", "'/v0data'", "//srv/x", "(/v1)"],
)
def test_a_path_is_found_after_a_colon_and_in_directories_named_like_versions(path: str) -> None:
    shown = public_text(Unavailable(f"cannot open {path}; try again"))
    assert "a file of the server" in shown
    assert not [part for part in ("srv", "run", "v0", "v1", "v2", "wal") if part in shown]


@pytest.mark.parametrize(
    "url",
    [
        "http://h/v0/x",
        "https://h:80/a/b",
        "http://[::1]:80/a",
        "s3://bucket/a/b",
        "POST /v0/watch",
        "`GET /v0/ws`",
        "POST /v0/topics/x/diff",
        "/v1/traces",
        "text/plain",
    ],
)
def test_urls_and_routes_stay_as_they_are(url: str) -> None:
    assert public_text(Unavailable(f"{url} failed")) == f"{url} failed"
