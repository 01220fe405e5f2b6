"""Other logs on the same machine and disk, driven in their own protocols by the same load generator."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Sequence

from topics_load import Connection, Lines, Load, dial, drive
from topics_server import opened

__all__ = ["jetstream", "redis_streams"]

_STREAM = "records"


def redis_streams(
    port: int, records: Sequence[bytes], *, batch: int, writers: int, seconds: float
) -> tuple[int, Load]:
    """Send pipelines of `batch` XADD to one fresh stream. Return the acknowledged records and the load."""
    _redis_ask(port, b"DEL", _STREAM.encode())
    commands = [_command(b"XADD", _STREAM.encode(), b"*", b"d", record) for record in records]
    requests = [b"".join(commands[at : at + batch]) for at in range(0, len(commands) - batch + 1, batch)]
    answer = Lines(b"\n", 2 * batch)
    connections = [Connection(port, requests[place:], answer) for place in range(writers)]
    with opened(connections):
        load = drive(connections, seconds)
    sent = load.requests * batch
    stored = int(_redis_ask(port, b"XLEN", _STREAM.encode())[1:])
    assert stored == sent, f"Redis holds {stored} of {sent} records"
    return sent, load


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _redis_ask(port: int, *words: bytes) -> bytes:
    with dial(port) as connection:
        connection.sendall(_command(*words))
        return connection.recv(4096).strip()


def jetstream(
    port: int, records: Sequence[bytes], *, batch: int, writers: int, seconds: float
) -> tuple[int, Load]:
    """Send `batch` messages to one fresh file stream, then read all their acknowledgements, repeatedly."""
    _jetstream_ask(port, f"STREAM.DELETE.{_STREAM}", {})
    config = {"name": _STREAM, "subjects": [_STREAM], "storage": "file", "num_replicas": 1}
    _jetstream_ask(port, f"STREAM.CREATE.{_STREAM}", config)
    connections = [_nats_writer(port, records, batch, place) for place in range(writers)]
    with opened(connections):
        load = drive(connections, seconds)
    sent = load.requests * batch
    stored = _jetstream_ask(port, f"STREAM.INFO.{_STREAM}", {})["state"]["messages"]
    assert stored == sent, f"NATS holds {stored} of {sent} records"
    return sent, load


def _nats_writer(port: int, records: Sequence[bytes], batch: int, place: int) -> Connection:
    inbox = f"_INBOX.{uuid.uuid4().hex}"
    messages = [f"PUB {_STREAM} {inbox} {len(record)}\r\n".encode() + record + b"\r\n" for record in records]
    requests = [b"".join(messages[at : at + batch]) for at in range(0, len(messages) - batch + 1, batch)]
    # An acknowledgement is one JSON object without nested objects.
    connection = Connection(port, requests[place:], Lines(b"}", batch))
    _nats_hello(connection.socket, inbox)
    return connection


def _nats_hello(connection: socket.socket, inbox: str) -> None:
    connection.sendall(f'CONNECT {{"verbose":false,"headers":false}}\r\nSUB {inbox} 1\r\nPING\r\n'.encode())
    _until(connection, b"PONG\r\n")


def _jetstream_ask(port: int, what: str, body: object) -> dict[str, dict[str, int]]:
    """Send a request to the management API of JetStream."""
    inbox, text = f"_INBOX.{uuid.uuid4().hex}", json.dumps(body)
    with dial(port) as connection:
        _nats_hello(connection, inbox)
        connection.sendall(f"PUB $JS.API.{what} {inbox} {len(text)}\r\n{text}\r\n".encode())
        answer = _until(connection, b"}\r\n")
    parsed: dict[str, dict[str, int]] = json.loads(answer[answer.index(b"{") :])
    return parsed


def _until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        piece = connection.recv(65536)
        if not piece:
            raise RuntimeError("NATS closed the connection")
        received += piece
    return received
