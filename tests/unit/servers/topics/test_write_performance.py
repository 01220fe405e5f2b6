"""A commit delayed under pressure is reported in every response to a write."""

from __future__ import annotations

import json

import msgspec
import pytest
from tests.unit.topics.client.fake_server import FakeServer, answer

from penstock.http.message import Request
from penstock.servers.topics.answers import write_answer
from penstock.servers.topics.websocket_messages import ack_message
from penstock.topics.model import WriteResult


def result(held_ms: float) -> WriteResult:
    return WriteResult(
        topic="t",
        first_seq=1,
        last_seq=1,
        head_seq=1,
        created=False,
        deduped=False,
        throttle_wait_ms=held_ms,
    )


def over_http(held_ms: float) -> object:
    body = write_answer(Request(b"POST", b"/v0/topics/t", {}), result(held_ms), return_seqs=True).body
    assert isinstance(body, bytes)
    return json.loads(body)


def over_websocket(held_ms: float) -> object:
    return json.loads(ack_message(msgspec.Raw(b"7"), result(held_ms), return_seqs=True, total_ms=1.0))


@pytest.mark.parametrize("told", [over_http, over_websocket])
def test_the_throttle_wait_is_reported_only_if_there_was_one(told: object) -> None:
    assert callable(told)
    assert told(2.5)["performance"]["throttle_wait_ms"] == 2.5
    assert told(0.0)["performance"].keys() == {"server_total_ms", "wal_append_ms", "fsync_ms"}


async def test_the_client_returns_the_throttle_wait() -> None:
    async with FakeServer(answer(over_http(2.5))).client() as client:
        assert (await client.write("t", [1])).throttle_wait_ms == 2.5
