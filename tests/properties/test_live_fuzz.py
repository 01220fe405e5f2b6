"""Arbitrary bytes in the decoders of live delivery produce an answer or a refusal, never another error."""

from __future__ import annotations

import json

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.servers.topics.test_websocket import FakeClient, masked

from penstock.http.errors import Refusal
from penstock.http.message import Request
from penstock.servers.topics.sse import read_id, write_id
from penstock.servers.topics.websocket_messages import (
    Framing,
    InvalidMessage,
    handshake,
    read_command,
    text_frame,
)
from penstock.topics.client.watch import FrameReader, event_of, problem_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OPS = st.sampled_from(["subscribe", "unsubscribe", "publish", "ping", "dance"])


@given(st.binary(max_size=200))
def test_any_bytes_as_an_id_are_positions_or_nothing(ident: bytes) -> None:
    cursors = read_id(ident)
    assert all(seq >= 0 for seq in cursors.values())


@given(st.dictionaries(st.text(max_size=20), st.integers(0, 2**64 - 1), max_size=5))
def test_every_id_comes_back(cursors: dict[str, int]) -> None:
    assert read_id(write_id(cursors)) == cursors


@given(st.binary(max_size=300))
@example(b"[" * 100_000)
def test_any_bytes_as_a_message_are_a_command_or_refused(text: bytes) -> None:
    refused = refusal_of(text)
    if refused is not None:
        assert refused.code in ("invalid_json", "invalid_request")
        json.loads(refused.request_id)


def refusal_of(text: bytes) -> InvalidMessage | None:
    """Return why the bytes are not a command. The connection refuses invalid UTF-8 before it parses
    commands."""
    try:
        if is_utf8(text):
            read_command(text)
    except InvalidMessage as error:
        return error
    return None


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(OPS, st.dictionaries(st.sampled_from(["topic", "topics", "records", "request_id", "limit"]), JSON))
def test_any_members_of_a_command_are_read_or_refused(op: str, members: dict[str, object]) -> None:
    text = json.dumps({"op": op, **members}).encode()
    try:
        command = read_command(text)
    except InvalidMessage as error:
        told = json.loads(error.request_id)
        assert told == members.get("request_id")
    else:
        assert json.loads(bytes(command.request_id)) == members.get("request_id")


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_on_a_websocket_are_messages_or_the_end(pieces: list[bytes]) -> None:
    framing = Framing()
    for piece in pieces:
        for _, message in framing.receive(piece):
            assert isinstance(message, bytes)
        framing.replies()


@given(st.binary(max_size=70_000))
def test_every_message_of_ours_is_read_by_the_other_side(payload: bytes) -> None:
    client = FakeClient()
    client.write(text_frame(payload))
    (frame,) = client.frames()
    assert bytes(frame.data) == payload


@given(st.binary(max_size=2000), st.lists(st.integers(1, 50), max_size=10))
def test_a_message_comes_whole_however_its_bytes_are_cut(payload: bytes, cuts: list[int]) -> None:
    data, framing, found = masked(payload), Framing(), []
    for cut in cuts:
        found += list(framing.receive(data[:cut]))
        data = data[cut:]
    found += list(framing.receive(data))
    assert found == [(True, payload)]


@given(
    st.dictionaries(
        st.sampled_from([b"upgrade", b"connection", b"sec-websocket-version", b"sec-websocket-key"]),
        st.binary(max_size=30),
    )
)
def test_any_headers_are_a_handshake_or_refused(headers: dict[bytes, bytes]) -> None:
    try:
        answer = handshake(Request(b"GET", b"/v0/ws", headers))
    except Refusal:
        return
    assert dict(answer)[b"upgrade"] == b"websocket"


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_frames_for_the_client_or_nothing(pieces: list[bytes]) -> None:
    reader = FrameReader()
    for piece in pieces:
        for frame in reader.feed(piece):
            try:
                event_of(frame)
                problem_of(frame)
            except msgspec.MsgspecError:
                pass
