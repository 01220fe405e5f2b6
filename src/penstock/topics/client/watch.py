"""Live streams of topics: the server pushes records, and the client reconnects after a disconnect."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Literal

import httpx
import msgspec

from penstock.clock import Clock
from penstock.jsontext import decode_list
from penstock.retry import Backoff
from penstock.topics.client.connection import Call, Connection, Repeat
from penstock.topics.client.errors import (
    Effect,
    Failure,
    UnexpectedAnswer,
    Unreachable,
    failure_of_answer,
    failure_of_transport,
)
from penstock.topics.client.models import match_tuple
from penstock.topics.errors import Damaged, ShuttingDown
from penstock.topics.model import Predicate, Record, Tombstone, TombstoneReason, records_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """An event in a watched topic.

    `records`: new records, as JSON objects in `fragments`. `gap`: records are gone; see `tombstone`.
    `caught_up`: there are no more records for now. `deleted`: the topic is gone. `not_followed`: a new topic
    matches the prefix, but the session has reached its limit; see `message`. `put_off`: the server is
    overloaded and sends records of this topic later.
    """

    kind: Literal["records", "gap", "caught_up", "deleted", "not_followed", "put_off"]
    topic: str
    head_seq: int = 0
    from_seq: int = 0
    to_seq: int = 0
    """Where to resume the watch: everything up to here has been delivered."""
    fragments: Sequence[bytes] = ()
    tombstone: Tombstone | None = None
    message: str = ""

    def records(self) -> list[Record]:
        """Return the records as objects."""
        return records_of(self.fragments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One named frame of a stream. Comments and settings are not frames."""

    name: str
    data: bytes
    id: str = ""


class FrameReader:
    """A splitter of bytes into frames.

    JSON may contain characters that other readers treat as line breaks.
    """

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
    """Decode a frame. Return None for an unknown name. Raise `msgspec.MsgspecError`."""
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


_ENCODER: Final = msgspec.json.Encoder()
_NOT_FOUND: Final = 404
_ENDED: Final = Failure(error=Unreachable("the server ended the stream without a reason"), effect=Effect.NONE)


class _Start(msgspec.Struct, omit_defaults=True):
    from_seq: int = 0
    tail: bool = False


class _Watch(msgspec.Struct, omit_defaults=True):
    topics: dict[str, _Start]
    node: list[str] = []
    limit: int = 0
    max_batch_bytes: int = 262_144
    heartbeat_ms: int = 15_000
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    match: tuple[str, str, str] | None = None


class _Created(msgspec.Struct):
    wid: str
    topics: dict[str, _Start]


_CREATED: Final = msgspec.json.Decoder(_Created)


class WatchCalls:
    """The watches of a client, which receive records as they are published."""

    _connection: Connection
    _clock: Clock
    _rng: random.Random

    async def watch(
        self,
        topics: Iterable[str] | Mapping[str, int | Literal["tail"]],
        *,
        node: str | Sequence[str] = (),
        limit: int = 0,
        max_batch_bytes: int = 262_144,
        heartbeat_ms: int = 15_000,
        include_tags: bool = False,
        include_meta: bool = True,
        include_data: bool = True,
        match: Predicate | str | None = None,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Follow these topics live: yield records, gaps and deletions as they happen.

        `topics` are names, each from its beginning, or a mapping from names to the sequence number to start
        after, or to "tail" for only new records. A name that ends in `*` stands for every topic with that
        prefix, including later ones, which start at their beginning.

        After a disconnect the watch reconnects and continues after the last yielded event. Nothing is lost or
        repeated, even if the server restarts, if the log still has the records. Raises `Unavailable` if the
        server is away longer than `retry_deadline`; start again from the last `to_seq` of each topic. The
        watch ends when every topic is deleted. Raises `TopicNotFound`, and `Damaged` if a record cannot be
        read.
        """
        starts = topics if isinstance(topics, Mapping) else dict.fromkeys(topics, 0)
        body = _Watch(
            topics={name: _start(start) for name, start in starts.items()},
            node=[node] if isinstance(node, str) else list(node),
            limit=limit,
            max_batch_bytes=max_batch_bytes,
            heartbeat_ms=heartbeat_ms,
            include_tags=include_tags,
            include_meta=include_meta,
            include_data=include_data,
            match=match_tuple(match),
        )
        watching = _Watching(self._connection, body, clock=self._clock, rng=self._rng)
        async with aclosing(watching.events()) as events:
            async for event in events:
                yield event


def _start(start: int | str) -> _Start:
    return _Start(from_seq=start) if isinstance(start, int) else _Start(tail=True)


class _Watching:
    """One watch, across all its connections and sessions."""

    def __init__(self, connection: Connection, body: _Watch, *, clock: Clock, rng: random.Random) -> None:
        self._connection = connection
        self._body = body
        self._clock = clock
        self._rng = rng
        self._wid = ""
        self._last_id = ""
        self._is_over = False
        self._has_begun = False
        self._backoff = self._new_backoff()

    def _new_backoff(self) -> Backoff:
        return Backoff(self._connection.policy, clock=self._clock, rng=self._rng)

    async def events(self) -> AsyncGenerator[WatchEvent, None]:
        async with self._connection.streaming() as http:
            while not self._is_over:
                if not self._wid:
                    for event in await self._create():
                        yield event
                failure = _ENDED
                try:
                    async with aclosing(self._stream(http)) as stream:
                        async for event in stream:
                            self._backoff = self._new_backoff()
                            yield event
                except httpx.HTTPError as error:
                    failure = failure_of_transport(error, self._connection.url, changes=False)
                except _Broken as broken:
                    failure = broken.failure
                if not self._is_over:
                    await self._pause(failure)

    async def _pause(self, failure: Failure) -> None:
        """Wait before the next connection. Raise the last failure if the deadline does not allow it."""
        if failure.effect is Effect.REFUSED:
            raise failure.error
        if not self._last_id:
            # The session counts sent records as read even if they were lost. Only an id resets it.
            self._wid = ""
        if failure.retry_after_s:
            await self._clock.sleep(failure.retry_after_s)
        if not await self._backoff.pause():
            raise failure.error

    async def _create(self) -> list[WatchEvent]:
        """Create a session that starts where the last one stopped.

        Return events for topics deleted meanwhile.
        """
        call = Call(
            method="POST",
            path="/v0/watch",
            repeat=Repeat.ALWAYS,
            body=_ENCODER.encode(self._body),
            query={"lenient": "true"} if self._has_begun else {},
        )
        answer = await self._connection.send(call)
        try:
            created = _CREATED.decode(answer.content)
        except msgspec.MsgspecError as error:
            raise UnexpectedAnswer(f"the response to a watch is invalid: {error}") from error
        self._wid, self._last_id = created.wid, ""
        for name, start in created.topics.items():
            # Replace "tail" by a number, which must not move when the session is created again.
            self._body.topics[name] = _Start(from_seq=start.from_seq)
        self._has_begun = True
        for name in [name for name in self._body.topics if name.endswith("*")]:
            # A topic that only the next session finds is new, so it is read from its beginning.
            self._body.topics[name] = _Start()
        named = [name for name in self._body.topics if not name.endswith("*")]
        gone = [WatchEvent(kind="deleted", topic=name) for name in named if name not in created.topics]
        for event in gone:
            self._update_position(event, "")
        return gone

    async def _stream(self, http: httpx.AsyncClient) -> AsyncGenerator[WatchEvent, None]:
        headers = {"Accept": "text/event-stream"}
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
        silence_s = self._body.heartbeat_ms / 1000 + self._connection.timeout_s
        timeout = httpx.Timeout(self._connection.timeout_s, read=silence_s)
        async with http.stream("GET", f"/v0/watch/{self._wid}", headers=headers, timeout=timeout) as response:
            if response.status_code != 200:
                await response.aread()
                self._on_refusal(response)
                return
            frames = FrameReader()
            async for piece in response.aiter_bytes():
                for frame in frames.feed(piece):
                    for event in self._interpret(frame):
                        yield event
                    if self._is_over:
                        return

    def _interpret(self, frame: Frame) -> list[WatchEvent]:
        """Interpret a frame. Raise `_Broken` if it asks for a reconnect or ends the watch."""
        try:
            if frame.name == "error":
                return self._on_problem(problem_of(frame))
            event = event_of(frame)
        except msgspec.MsgspecError as error:
            wrong = UnexpectedAnswer(f"the server sent an invalid event: {error}")
            raise _Broken(Failure(error=wrong, effect=Effect.REFUSED)) from error
        if event is None:
            return []
        self._update_position(event, frame.id)
        return [event]

    def _on_refusal(self, response: httpx.Response) -> None:
        """Raise `_Broken`, unless the session is gone and a new one must be created."""
        if response.status_code == _NOT_FOUND:
            self._wid = ""
        else:
            raise _Broken(failure_of_answer(response, None, changes=False))

    def _on_problem(self, problem: WatchProblem) -> list[WatchEvent]:
        """Handle an `error` event: topics that send nothing for now, or a reason to reconnect later."""
        if problem.code == 429:
            kind: Literal["put_off", "not_followed"] = "put_off" if problem.retry_after_ms else "not_followed"
            return [WatchEvent(kind=kind, topic=name, message=problem.text) for name in problem.topics]
        if problem.code == 500:
            error = Damaged(problem.text, {"topic": problem.topic})
            raise _Broken(Failure(error=error, effect=Effect.REFUSED))
        if problem.code == 410:
            self._wid = ""
        raise _Broken(Failure(error=ShuttingDown(problem.text), effect=Effect.NONE))

    def _update_position(self, event: WatchEvent, ident: str) -> None:
        """Store the position after this event, for the next session and the next connection."""
        self._last_id = ident or self._last_id
        if event.kind == "deleted":
            self._body.topics.pop(event.topic, None)
            self._is_over = not self._body.topics
        else:
            self._body.topics[event.topic] = _Start(from_seq=event.to_seq)


class _Broken(Exception):
    """The stream ended early."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure
