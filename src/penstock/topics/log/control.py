"""The bodies of frames that are not records, as values and as bytes.

`lp` is a u32 length and that many bytes. `opt` is a byte 0, or a byte 1 and the value. Decoding accepts only
the output of encoding and raises `Corrupt` for anything else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import Corrupt
from penstock.storage import Buffer
from penstock.topics.model import Predicate

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_EQ: Final = 0
_GLOB: Final = 1
_ABSENT: Final = b"\0"
_PRESENT: Final = b"\1"

T = TypeVar("T")


class BodyReader:
    """A reader that takes values from the front of a body."""

    def __init__(self, body: Buffer, what: str) -> None:
        self._body = memoryview(body)
        self._at = 0
        self._what = what

    def corrupt(self, why: str) -> Corrupt:
        return Corrupt(f"the body of a {self._what} frame is damaged: {why}")

    def take(self, size: int) -> memoryview:
        if size > len(self._body) - self._at:
            raise self.corrupt("it ends too early")
        part = self._body[self._at : self._at + size]
        self._at += size
        return part

    def u8(self) -> int:
        return self.take(1)[0]

    def u32(self) -> int:
        value: int = _U32.unpack(self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack(self.take(8))[0]
        return value

    def lp(self) -> bytes:
        return bytes(self.take(self.u32()))

    def text(self) -> str:
        try:
            return str(self.lp(), "utf-8")
        except UnicodeDecodeError:
            raise self.corrupt("a name is not UTF-8") from None

    def opt(self, read: Callable[[], T]) -> T | None:
        present = self.u8()
        if present > 1:
            raise self.corrupt(f"{present} is neither absent (0) nor present (1)")
        return read() if present else None

    def end(self) -> None:
        if self._at != len(self._body):
            raise self.corrupt(f"{len(self._body) - self._at} bytes are left over")

    @property
    def left(self) -> int:
        return len(self._body) - self._at


def with_length(value: bytes) -> bytes:
    """Encode the value as `lp`."""
    return _U32.pack(len(value)) + value


def _opt_u64(value: int | None) -> bytes:
    return _ABSENT if value is None else _PRESENT + _U64.pack(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicChange:
    """The creation, change or deletion of a topic. The config is empty for a deletion."""

    name: str
    config: bytes = b""
    """The resolved config as JSON."""
    lost_seq: int = 0
    """The highest number that a lost topic of this name may have used. This topic starts above it."""

    def encode(self) -> bytes:
        lost = _U64.pack(self.lost_seq) if self.lost_seq else b""
        return with_length(self.name.encode()) + with_length(self.config) + lost

    @classmethod
    def decode(cls, body: Buffer) -> TopicChange:
        reader = BodyReader(body, "topic")
        name, config = reader.text(), reader.lp()
        change = cls(name=name, config=config, lost_seq=reader.u64() if reader.left else 0)
        reader.end()
        return change


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deletion:
    """A deletion of records: a prefix, by tag, or individually.

    `bound_head` is one above the head at the time of the call. Replay deletes nothing at or above it, so that
    later writes survive.
    """

    before_seq: int | None = None
    match: Predicate | None = None
    seqs: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    bound_head: int | None = None

    def encode(self) -> bytes:
        return b"".join(
            (
                _opt_u64(self.before_seq),
                encode_match(self.match),
                _U32.pack(len(self.seqs)),
                self.seqs.astype("<u8").tobytes(),
                _opt_u64(self.bound_head),
            )
        )

    @classmethod
    def decode(cls, body: Buffer) -> Deletion:
        reader = BodyReader(body, "delete")
        before_seq = reader.opt(reader.u64)
        match = reader.opt(lambda: read_match(reader))
        seqs = np.frombuffer(reader.take(8 * reader.u32()), "<u8").astype(np.uint64)
        bound_head = reader.opt(reader.u64)
        reader.end()
        return cls(before_seq=before_seq, match=match, seqs=seqs, bound_head=bound_head)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deletion) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.encode())


def encode_match(match: Predicate | None) -> bytes:
    """Encode a predicate, or its absence."""
    if match is None:
        return _ABSENT
    return _PRESENT + bytes([_GLOB if match.is_prefix else _EQ]) + with_length(match.value.encode())


def read_match(reader: BodyReader) -> Predicate:
    """Decode a predicate that is present. Raise `Corrupt` if it is damaged."""
    operator = reader.u8()
    if operator not in (_EQ, _GLOB):
        raise reader.corrupt(f"unknown operator {operator}")
    return Predicate(value=reader.text(), is_prefix=operator == _GLOB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """How far records were lost: the cap floor, the earliest live record, the age floor, the trim floor.

    Each floor is the first sequence number that was not lost to its cause. The trim floor is omitted while it
    has its initial value.
    """

    cap: int
    earliest_seq: int
    ttl: int
    trim: int = 1

    def encode(self) -> bytes:
        values = (self.cap, self.earliest_seq, self.ttl)
        return b"".join(_U64.pack(value) for value in (values if self.trim <= 1 else (*values, self.trim)))

    @classmethod
    def decode(cls, body: Buffer) -> Watermarks:
        reader = BodyReader(body, "watermark")
        cap, earliest_seq, ttl = reader.u64(), reader.u64(), reader.u64()
        trim = reader.u64() if reader.left else 1
        reader.end()
        return cls(cap=cap, earliest_seq=earliest_seq, ttl=ttl, trim=trim)


def write_head_watermark(reserved_head: int) -> bytes:
    """Encode a head watermark: sequence numbers up to this one may have been acknowledged."""
    return _U64.pack(reserved_head)


def read_head_watermark(body: Buffer) -> int:
    """Return the reserved head in a frame."""
    reader = BodyReader(body, "head")
    reserved_head = reader.u64()
    reader.end()
    return reserved_head
