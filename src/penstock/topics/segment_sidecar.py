"""The small files beside a segment: one header and one checksum for all of them."""

from __future__ import annotations

import struct
from typing import Final

from xxhash import xxh3_64_intdigest

from penstock.storage import Buffer
from penstock.topics.errors import Damaged
from penstock.topics.segment import segment_name

__all__ = ["SIDECAR_VERSION", "close_sidecar", "open_sidecar", "sidecar_damaged"]

SIDECAR_VERSION: Final = 1

_HEAD = struct.Struct("<4sIQII")
_CHECKSUM_BYTES: Final = 8
_BODY_AT: Final = _HEAD.size + _CHECKSUM_BYTES


def close_sidecar(magic: bytes, first_seq: int, count: int, body: bytes) -> bytes:
    """The file that says `body` about the first `count` records of a segment."""
    head = _HEAD.pack(magic, SIDECAR_VERSION, first_seq, count, len(body))
    return head + xxh3_64_intdigest(head + body).to_bytes(_CHECKSUM_BYTES, "little") + body


def open_sidecar(raw: Buffer, magic: bytes, first_seq: int) -> tuple[int, memoryview]:
    """For how many records a file speaks, and its body. Raises `Damaged` unless every bit is as written."""
    view = memoryview(raw)
    if len(view) < _BODY_AT:
        raise sidecar_damaged(first_seq, f"only {len(view)} bytes are left of it")
    head, body = view[: _HEAD.size], view[_BODY_AT:]
    digest = int.from_bytes(view[_HEAD.size : _BODY_AT], "little")
    if xxh3_64_intdigest(head.tobytes() + body.tobytes()) != digest:
        raise sidecar_damaged(first_seq, "its checksum is wrong")
    found_magic, version, found_seq, count, body_len = _HEAD.unpack(head)
    if (found_magic, found_seq, body_len) != (magic, first_seq, len(body)):
        raise sidecar_damaged(first_seq, "it belongs to something else")
    if version != SIDECAR_VERSION:
        raise sidecar_damaged(first_seq, f"its version {version} is not known here")
    return count, body


def sidecar_damaged(first_seq: int, why: str) -> Damaged:
    return Damaged(
        f"a file beside segment {segment_name(first_seq)} is damaged: {why}", {"first_seq": first_seq}
    )
