"""Server-sent events as a client reads them: from bytes to what happened in a topic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from penstock.jsontext import decode_list
from penstock.topics.model import Record, Tombstone, TombstoneReason, records_of

__all__ = ["Frame", "FrameReader", "WatchEvent", "WatchProblem", "event_of", "problem_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """Something that happened in a topic that is watched.

    `records`: they are there, as JSON objects in `fragments`. `gap`: records are gone, see `tombstone`.
    `caught_up`: this was all there is for now. `deleted`: the topic is gone. `not_followed`: a topic with the
    prefix appeared, and the session has as many as it may; `message` says so. `put_off`: the server is
    pressed hard, and sends records of this topic later.
    """

    kind: Literal["records", "gap", "caught_up", "deleted", "not_followed", "put_off"]
    topic: str
    head_seq: int = 0
    from_seq: int = 0
    to_seq: int = 0
    """Where to watch from the next time: everything up to here has been told."""
    fragments: Sequence[bytes] = ()
    tombstone: Tombstone | None = None
    message: str = ""

    def records(self) -> list[Record]:
        """The records as objects."""
        return records_of(self.fragments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame with a name; comments and settings are none."""

    name: str
    data: bytes
    id: str = ""


class FrameReader:
    """Cuts bytes into frames. JSON may hold characters that other line readers take for line breaks."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        *blocks, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            fields = dict(_field(line) for line in block.split(b"\n") if line and not line.startswith(b":"))
            if b"event" in fields:
                yield Frame(
                    name=fields[b"event"].decode("utf-8", "replace"),
                    data=fields.get(b"data", b""),
                    id=fields.get(b"id", b"").decode("ascii", "replace"),
                )


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name, value.removeprefix(b" ")


class _Record(msgspec.Struct):
    topic: str
    from_seq: int
    to_seq: int
    head_seq: int
    records: list[msgspec.Raw]


class _Gap(msgspec.Struct):
    topic: str
    reason: TombstoneReason
    gap_from: int
    gap_to: int
    earliest_seq: int
    head_seq: int


class _Place(msgspec.Struct):
    topic: str
    head_seq: int


class WatchProblem(msgspec.Struct):
    """An `error` event."""

    code: int | str = ""
    error: str = ""
    message: str = ""
    topic: str = ""
    topics: list[str] = []
    retry_after_ms: int = 0

    @property
    def text(self) -> str:
        return self.error or self.message or f"the server reports {self.code}"


_DECODE_RECORD: Final = msgspec.json.Decoder(_Record)
_DECODE_GAP: Final = msgspec.json.Decoder(_Gap)
_DECODE_PLACE: Final = msgspec.json.Decoder(_Place)
_DECODE_PROBLEM: Final = msgspec.json.Decoder(WatchProblem)


def problem_of(frame: Frame) -> WatchProblem:
    return _DECODE_PROBLEM.decode(frame.data)


def event_of(frame: Frame) -> WatchEvent | None:
    """What a frame tells; None for a name that this client does not know. Raises `msgspec.MsgspecError`."""
    if frame.name == "record":
        batch, deep = decode_list(_DECODE_RECORD, frame.data)
        return WatchEvent(
            kind="records",
            topic=batch.topic,
            head_seq=batch.head_seq,
            from_seq=batch.from_seq,
            to_seq=batch.to_seq,
            fragments=[bytes(record) for record in batch.records] if deep is None else deep,
        )
    if frame.name == "tombstone":
        return _gap_event(_DECODE_GAP.decode(frame.data))
    if frame.name == "caught-up":
        place = _DECODE_PLACE.decode(frame.data)
        return WatchEvent(kind="caught_up", topic=place.topic, head_seq=place.head_seq, to_seq=place.head_seq)
    if frame.name == "topic-deleted":
        return WatchEvent(kind="deleted", topic=_DECODE_PLACE.decode(frame.data).topic)
    return None


def _gap_event(gap: _Gap) -> WatchEvent:
    tombstone = Tombstone(
        gap_from=gap.gap_from,
        gap_to=gap.gap_to,
        reason=gap.reason,
        missed_estimate=gap.gap_to - gap.gap_from + 1,
        earliest_seq=gap.earliest_seq,
        head_seq=gap.head_seq,
    )
    is_new = gap.reason == "recreated"
    return WatchEvent(
        kind="gap",
        topic=gap.topic,
        head_seq=gap.head_seq,
        to_seq=gap.earliest_seq - 1 if is_new else gap.gap_to,
        tombstone=tombstone,
        message=gap.reason,
    )
