"""The examples that need no Spark, run as a reader would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.process.cli_runner import environment
from tests.process.topics_server import KEY, serving

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(180)
def test_the_job_queue_loses_no_job_when_a_worker_is_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "job_queue.py", tmp_path / "d"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "jobs 60, done 59, dead letters ['image-13.broken']\n"


@contextmanager
def feed(url: str, topic: str) -> Iterator[httpx.Client]:
    """The gateway of the feed, and a client of it that knows nothing of topics."""
    command = [sys.executable, EXAMPLES / "live_feed" / "feed.py", url, topic, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment(TOPICS_API_KEY=KEY)
    ) as process:
        try:
            assert process.stdout is not None
            with httpx.Client(base_url=process.stdout.readline().strip(), timeout=20) as client:
                yield client
        finally:
            process.terminate()


def events(response: httpx.Response) -> Iterator[tuple[str, str, dict[str, object]]]:
    """The events of a stream as a browser cuts them: id, name and data."""
    rest = ""
    for piece in response.iter_text():
        *blocks, rest = (rest + piece).split("\n\n")
        for block in blocks:
            fields = dict(re.findall(r"^(id|event|data): ?(.*)$", block, re.MULTILINE))
            if "event" in fields:
                yield fields["id"], fields["event"], json.loads(fields["data"])


def data_of(event: tuple[str, str, dict[str, object]]) -> list[object]:
    records = event[2]["records"]
    assert isinstance(records, list)
    return [record["data"] for record in records]


@pytest.mark.timeout(120)
def test_the_feed_shows_what_there_is_what_comes_and_goes_on_where_a_browser_stopped(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as writer:
        writer.write("news", [{"text": "old"}])
        with feed(server.url, "news") as browser:
            page = browser.get("/")
            assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert "EventSource" in page.text
            assert browser.get("/other").status_code == 404
            with browser.stream("GET", "/feed") as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                told = events(stream)
                assert data_of(next(told)) == [{"text": "old"}]
                assert next(told)[1] == "caught-up"
                writer.write("news", [{"text": "live"}])
                live = next(told)
                assert data_of(live) == [{"text": "live"}]
            writer.write("news", [{"text": "missed"}])
            with browser.stream("GET", "/feed", headers={"Last-Event-ID": live[0]}) as stream:
                assert data_of(next(events(stream))) == [{"text": "missed"}]
            with browser.stream("GET", "/feed", headers={"Last-Event-ID": "nonsense"}) as stream:
                assert data_of(next(events(stream)))[0] == {"text": "old"}


@pytest.mark.timeout(60)
def test_a_feed_without_its_topic_or_its_server_says_so(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, feed(server.url, "missing") as browser:
        refused = browser.get("/feed")
        assert (refused.status_code, "missing" in refused.text) == (502, True)
        server.process.terminate()
        server.process.wait(20)
        away = browser.get("/feed")
        assert (away.status_code, "does not respond" in away.text) == (502, True)
