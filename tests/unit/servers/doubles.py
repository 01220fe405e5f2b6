"""An engine in memory that keeps to the API's seam, and a client that speaks raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import PenstockError
from penstock.http import HttpLimits, Listener
from penstock.http.app import App
from penstock.http.auth import Keyring
from penstock.servers.topics import TopicsApi, topics_app
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.errors import InvalidRequest, TopicNotEmpty, TopicNotFound
from penstock.topics.model import (
    BareRecord,
    DeleteResult,
    NewRecord,
    Page,
    Predicate,
    PutResult,
    QueueCounts,
    RemoveResult,
    TopicState,
    WriteResult,
)
from penstock.topics.names import check_topic_name
from penstock.topics.schedule.pressure import Scheduler
from penstock.topics.stats import EngineStats, WalStats

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Made once: a client of its own would load every certificate of the machine."""
NOW_MS = 1_748_450_000_000


WAL = WalStats(
    frames=7,
    batches=3,
    fsyncs=2,
    bytes_written=700,
    rotations=1,
    queue_depth_peak=4,
    fsync_counts=(0, 1, 1, 0, 0, 0, 0, 0, 0, 0),
    fsync_micros_total=300.0,
)


@dataclass
class Log:
    config: TopicConfig
    records: list[bytes] = field(default_factory=list)
    tags: list[str | None] = field(default_factory=list)
    deleted: set[int] = field(default_factory=set)
    touched: bool = False

    def live(self) -> list[int]:
        return [seq for seq in range(1, len(self.records) + 1) if seq not in self.deleted]


class MemoryEngine:
    """Topics in dictionaries. A write waits for one future, as a commit does, unless `commits_at_once`."""

    def __init__(self) -> None:
        self.logs: dict[str, Log] = {}
        self.ready = True
        self.scheduler = Scheduler(SYSTEM_CLOCK)
        self.replay_progress = 1.0
        self.commits_at_once = False
        self.error: Exception | None = None
        self.writes: list[dict[str, object]] = []
        self.polls = 0
        self._published = asyncio.Event()
        self.gate: asyncio.Future[None] | None = None
        self.is_closed = False

    async def start(self) -> None:
        if self.error is not None:
            raise self.error
        self.ready = True

    async def close(self) -> None:
        self.is_closed = True

    def _log(self, name: str) -> Log:
        if self.error is not None:
            raise self.error
        if name not in self.logs:
            raise TopicNotFound(name)
        return self.logs[name]

    async def check_writable(self) -> None:
        pass

    async def put_topic(self, name: str, config: TopicConfig) -> PutResult:
        check_topic_name(name)
        created = name not in self.logs
        resolved = config.resolved(name)
        if created:
            self.logs[name] = Log(resolved)
        self.logs[name].config = resolved
        return PutResult(topic=name, created=created, config=resolved)

    def state(self, name: str, *, touch: bool = True) -> TopicState:
        log = self._log(name)
        log.touched = log.touched or touch
        live = log.live()
        return TopicState(
            topic=name,
            config=log.config,
            head_seq=len(log.records),
            earliest_seq=min(live, default=len(log.records) + 1),
            count=len(live),
            bytes=sum(len(log.records[seq - 1]) for seq in live),
            effective_priority=500 if log.touched else 0,
            last_write_ms=NOW_MS if log.records else None,
            last_read_ms=NOW_MS if log.touched else None,
            queue=QueueCounts(ready=len(live), in_flight=0, dead_lettered=0)
            if log.config.type == "queue"
            else None,
        )

    def topics(
        self,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = 100,
        touch: bool = False,
        allowed: Callable[[str], bool] | None = None,
    ) -> tuple[list[TopicState], str | None]:
        names = [
            name
            for name in sorted(self.logs)
            if name.startswith(prefix) and name > after and (allowed is None or allowed(name))
        ]
        page = names[:limit]
        return [self.state(name, touch=touch) for name in page], page[-1] if len(names) > limit else None

    async def remove_topic(self, name: str, *, if_empty: bool = False) -> RemoveResult:
        log = self.logs.get(name)
        if if_empty and log is not None and log.live():
            raise TopicNotEmpty("not empty", {"topic": name, "count": len(log.live())})
        return RemoveResult(topic=name, deleted=self.logs.pop(name, None) is not None)

    def begin_write(
        self,
        name: str,
        records: Sequence[BareRecord],
        done: Callable[[WriteResult | PenstockError], None],
        *,
        node: str | None = None,
        parsed: bool = False,
        insist: bool = False,
    ) -> bool:
        """Every write waits."""
        return False

    async def write(
        self,
        name: str,
        records: Sequence[BareRecord],
        *,
        node: str | None = None,
        idempotency_key: str | None = None,
        create: bool | None = None,
        config: TopicConfig | None = None,
        parsed: bool = False,
        insist: bool = False,
    ) -> WriteResult:
        if self.error is not None:
            raise self.error
        if not records:
            raise InvalidRequest("a write needs at least one record")
        created = name not in self.logs
        if created:
            if create is False:
                raise TopicNotFound(name)
            await self.put_topic(name, config or TopicConfig())
        self.writes.append({"node": node, "key": idempotency_key, "records": list(records)})
        if self.gate is not None:
            await self.gate
        elif not self.commits_at_once:
            committed = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(committed.set_result, None)
            await committed
        log = self.logs[name]
        first = len(log.records) + 1
        for record in records:
            log.records.append(bytes(record.data))
            log.tags.append(record.tag if isinstance(record, NewRecord) else None)
        self._published.set()
        self._published = asyncio.Event()
        head = len(log.records)
        return WriteResult(
            topic=name, first_seq=first, last_seq=head, head_seq=head, created=created, deduped=False
        )

    async def diff(
        self,
        name: str,
        from_seq: int = 0,
        *,
        limit: int = 0,
        node: Sequence[str] = (),
        include_tags: bool = False,
        include_meta: bool = True,
        wait_ms: int = 0,
        max_batch_bytes: int = 0,
        match: Predicate | None = None,
    ) -> Page:
        log = self._log(name)
        published = self._published
        if wait_ms and len(log.records) <= from_seq:
            self.polls += 1
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await published.wait()
            except TimeoutError:
                pass
            finally:
                self.polls -= 1
        seqs = [seq for seq in log.live() if seq > from_seq][: limit or 256]
        fragments = [b'{"$seq":%d,"$ts":%d,"data":%b}' % (seq, NOW_MS, log.records[seq - 1]) for seq in seqs]
        return Page(
            topic=name,
            fragments=fragments,
            next_from_seq=seqs[-1] if seqs else len(log.records),
            head_seq=len(log.records),
            earliest_seq=min(log.live(), default=len(log.records) + 1),
            tombstone=None,
            records_scanned=len(seqs),
        )

    async def delete(
        self, name: str, *, before_seq: int | None = None, match: Predicate | None = None
    ) -> DeleteResult:
        log = self._log(name)
        doomed = {
            seq
            for seq in log.live()
            if (before_seq is None or seq < before_seq)
            and (match is None or log.tags[seq - 1] == match.value)
        }
        log.deleted |= doomed
        state = self.state(name, touch=False)
        return DeleteResult(
            topic=name,
            deleted=len(doomed),
            earliest_seq=state.earliest_seq,
            head_seq=state.head_seq,
            count=state.count,
            bytes=state.bytes,
        )

    def exists(self, name: str) -> bool:
        return name in self.logs

    @property
    def topic_count(self) -> int:
        return len(self.logs)

    def is_fed(self, name: str) -> bool:
        return False

    async def drain(self, name: str) -> None:
        """No router feeds anything here."""

    @property
    def router_count(self) -> int:
        return 0

    def stats(self) -> EngineStats:
        states, _ = self.topics(limit=10**6)
        by_class = dict.fromkeys(Durability, 0)
        for state in states:
            assert state.config.durability is not None
            by_class[state.config.durability] += 1
        return EngineStats(
            ready=self.ready,
            topics=len(states),
            by_class=by_class,
            queue_topics=sum(state.config.type == "queue" for state in states),
            records_live=sum(state.count for state in states),
            bytes_live=sum(state.bytes for state in states),
            wal=WAL,
        )


@dataclass
class Running:
    """A served engine and how to reach it."""

    engine: MemoryEngine
    api: TopicsApi
    app: App
    listener: Listener
    host: str
    port: int
    wires: list[Wire] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def dial(self) -> Wire:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        self.wires.append(Wire(reader, writer))
        return self.wires[-1]

    async def settled(self, connections: int) -> None:
        """Wait until the server has so many connections."""
        await until(lambda: self.listener.connections == connections)


def http(url: str = "", *, http2: bool = False, key: str | None = None) -> httpx.AsyncClient:
    """A real client, for one of the two protocols."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(
        base_url=url, http1=not http2, http2=http2, headers=headers, verify=_NO_TLS, trust_env=False
    )


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


@contextlib.asynccontextmanager
async def running(
    keys: str = "",
    *,
    limits: HttpLimits | None = None,
    in_flight_per_key_max: int = 1000,
    probes_need_key: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> AsyncIterator[Running]:
    """The whole edge over an engine in memory, on a free port."""
    engine = MemoryEngine()
    api = TopicsApi(engine)
    app = topics_app(
        api,
        Keyring.parse(keys),
        in_flight_per_key_max=in_flight_per_key_max,
        probes_need_key=probes_need_key,
    )
    listener = Listener(app, limits, clock=clock)
    host, port = await listener.bind("127.0.0.1", 0)
    server = Running(engine, api, app, listener, host, port)
    try:
        yield server
    finally:
        api.drain()
        if engine.gate is not None and not engine.gate.done():
            engine.gate.set_result(None)
        for wire in server.wires:
            await wire.close()
        await listener.drain(timeout_s=1)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        return msgspec.json.decode(self.body, type=dict[str, object])

    @property
    def code(self) -> str:
        error = self.json()["error"]
        assert isinstance(error, dict)
        assert set(error) <= {"code", "message", "detail"}
        assert error["message"]
        return str(error["code"])


class Wire:
    """One HTTP/1.1 connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(lines[0].split()[1]), headers, body)

    async def end(self) -> bytes:
        """Everything until the server closes."""
        return await asyncio.wait_for(self.reader.read(), 10)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def post(path: str, body: bytes, *headers: str) -> bytes:
    more = "".join(f"{header}\r\n" for header in headers)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def get(path: str, *headers: str) -> bytes:
    more = "".join(f"{header}\r\n" for header in headers)
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode()
