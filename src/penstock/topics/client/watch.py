"""Follow topics: the server sends records as they come, and the client reconnects when it is cut off."""

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
    """Something that happened in a topic that is watched.

    `records`: they are there, as JSON objects in `fragments`. `gap`: records are gone, see `tombstone`.
    `caught_up`: this was all there is for now. `deleted`: the topic is gone. `not_followed`: a topic with the
    prefix appeared, and the session has as many as it may; `message` says so. `put_off`: the server is
    overloaded, and sends records of this topic later.
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
    """Decode a frame; None for a name that this client does not know. Raises `msgspec.MsgspecError`."""
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
    """The watches of a client: records are sent as they are published."""

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

        `topics` are names, each from its beginning, or names with the sequence to start after, or "tail" for
        what comes from now on. A name that ends in `*` stands for every topic that begins so, also those that
        appear later, which are told from their beginning.

        A connection that breaks is opened again, and continues after the last event that was yielded:
        nothing is lost or repeated, also when the server was restarted, as long as the log has it. A server
        that is away longer than `retry_deadline` ends it with `Unavailable`; start again from the last
        `to_seq` of each topic. It ends when every topic was deleted. Raises `TopicNotFound`, and
        `Damaged` where a record cannot be read.
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
    """One watch over as many connections and sessions as it takes."""

    def __init__(self, connection: Connection, body: _Watch, *, clock: Clock, rng: random.Random) -> None:
        self._connection = connection
        self._body = body
        self._clock = clock
        self._rng = rng
        self._wid = ""
        self._last_id = ""
        self._is_over = False
        self._has_begun = False
        self._backoff = self._fresh()

    def _fresh(self) -> Backoff:
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
                            self._backoff = self._fresh()
                            yield event
                except httpx.HTTPError as error:
                    failure = failure_of_transport(error, self._connection.url, changes=False)
                except _Broken as broken:
                    failure = broken.failure
                if not self._is_over:
                    await self._pause(failure)

    async def _pause(self, failure: Failure) -> None:
        """Before the next connection; raises the reason of the last failure when there is no time left."""
        if failure.effect is Effect.REFUSED:
            raise failure.error
        if not self._last_id:
            # What was sent and did not arrive counts as read by the session; only an id takes it back.
            self._wid = ""
        if failure.retry_after_s:
            await self._clock.sleep(failure.retry_after_s)
        if not await self._backoff.pause():
            raise failure.error

    async def _create(self) -> list[WatchEvent]:
        """A session that starts where the last one stopped; topics deleted meanwhile are reported."""
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
            raise UnexpectedAnswer(f"the answer to a watch is not what it should be: {error}") from error
        self._wid, self._last_id = created.wid, ""
        for name, start in created.topics.items():
            # Where "tail" was, a number: it must not move when the session is created again.
            self._body.topics[name] = _Start(from_seq=start.from_seq)
        self._has_begun = True
        for name in [name for name in self._body.topics if name.endswith("*")]:
            # A topic that the next session finds and this one did not know appeared since: all of it is new.
            self._body.topics[name] = _Start()
        named = [name for name in self._body.topics if not name.endswith("*")]
        gone = [WatchEvent(kind="deleted", topic=name) for name in named if name not in created.topics]
        for event in gone:
            self._note(event, "")
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
                self._refused(response)
                return
            frames = FrameReader()
            async for piece in response.aiter_bytes():
                for frame in frames.feed(piece):
                    for event in self._told(frame):
                        yield event
                    if self._is_over:
                        return

    def _told(self, frame: Frame) -> list[WatchEvent]:
        """Interpret a frame. Raises `_Broken` if it is a reason to come back, or to give up."""
        try:
            if frame.name == "error":
                return self._troubled(problem_of(frame))
            event = event_of(frame)
        except msgspec.MsgspecError as error:
            wrong = UnexpectedAnswer(f"an event of the server is not what it should be: {error}")
            raise _Broken(Failure(error=wrong, effect=Effect.REFUSED)) from error
        if event is None:
            return []
        self._note(event, frame.id)
        return [event]

    def _refused(self, response: httpx.Response) -> None:
        """Raises `_Broken`, unless the session is gone and a new one has to be created."""
        if response.status_code == _NOT_FOUND:
            self._wid = ""
        else:
            raise _Broken(failure_of_answer(response, None, changes=False))

    def _troubled(self, problem: WatchProblem) -> list[WatchEvent]:
        """Handle an `error` event: topics that will send nothing, or a reason to reconnect later."""
        if problem.code == 429:
            kind: Literal["put_off", "not_followed"] = "put_off" if problem.retry_after_ms else "not_followed"
            return [WatchEvent(kind=kind, topic=name, message=problem.text) for name in problem.topics]
        if problem.code == 500:
            error = Damaged(problem.text, {"topic": problem.topic})
            raise _Broken(Failure(error=error, effect=Effect.REFUSED))
        if problem.code == 410:
            self._wid = ""
        raise _Broken(Failure(error=ShuttingDown(problem.text), effect=Effect.NONE))

    def _note(self, event: WatchEvent, ident: str) -> None:
        """Note what comes after this event, for the next session and the next connection."""
        self._last_id = ident or self._last_id
        if event.kind == "deleted":
            self._body.topics.pop(event.topic, None)
            self._is_over = not self._body.topics
        else:
            self._body.topics[event.topic] = _Start(from_seq=event.to_seq)


class _Broken(Exception):
    """The stream ended before its time."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure
