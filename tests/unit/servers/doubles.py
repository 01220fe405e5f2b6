"""The real engine on an in-memory disk with a real listener, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.http import HttpLimits, Listener
from penstock.http.app import App
from penstock.http.auth import Keyring
from penstock.servers.topics import TopicsApi, topics_app
from penstock.testing.clock import ManualClock
from penstock.testing.disk import FakeDisk
from penstock.testing.topics_kit import InlineCommitters, InlineWorkers
from penstock.topics import BareRecord, Engine, EngineConfig, TopicConfig, WriteResult

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Created once: each SSL context loads every certificate of the machine."""
NOW_MS = 1_748_450_000_000


class MemoryEngine(Engine):
    """The engine on an in-memory disk. Its commits can be held; `error` is raised by every call."""

    def __init__(self, *, is_quick: bool = False) -> None:
        clock = ManualClock(NOW_MS)
        self.committers = InlineCommitters(are_quick=is_quick)
        super().__init__(
            EngineConfig(data_dir="/data", wal_shards=1),
            fs=FakeDisk(clock=clock),
            clock=clock,
            workers=InlineWorkers(),
            committers=self.committers,
        )
        self.error: Exception | None = None
        self.keys: list[str | None] = []
        """The idempotency key of every write."""
        self.is_closed = False

    def _check_ready(self) -> None:
        if self.error is not None:
            raise self.error
        super()._check_ready()

    async def start(self) -> None:
        if self.error is not None:
            raise self.error
        await super().start()

    async def close(self) -> None:
        self.is_closed = True
        await super().close()

    def append(
        self,
        name: str,
        records: Sequence[BareRecord],
        done: Callable[[WriteResult | Exception], None],
        *,
        node: str | None = None,
        idempotency_key: str | None = None,
        create: bool | None = None,
        config: TopicConfig | None = None,
        parsed: bool = False,
        insist: bool = False,
    ) -> bool:
        self.keys.append(idempotency_key)
        return super().append(
            name,
            records,
            done,
            node=node,
            idempotency_key=idempotency_key,
            create=create,
            config=config,
            parsed=parsed,
            insist=insist,
        )

    @property
    def write_count(self) -> int:
        return len(self.keys)

    @property
    def polls(self) -> int:
        """The number of reads that wait for a record."""
        return sum(len(topic.subscribers) for topic in self._catalog.all())

    async def contents(self, name: str) -> list[bytes]:
        return [bytes(record.data) for record in (await self.diff(name)).records()]


@dataclass
class Running:
    """A served engine and its address."""

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
        """Wait until the server has this many connections."""
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
    is_quick: bool = False,
    is_recovered: bool = True,
    clock: Clock = SYSTEM_CLOCK,
) -> AsyncIterator[Running]:
    """Run the whole server over an in-memory engine on a free port."""
    engine = MemoryEngine(is_quick=is_quick)
    if is_recovered:
        await engine.start()
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
        engine.committers.release()
        for wire in server.wires:
            await wire.close()
        await listener.drain(timeout_s=1)
        await engine.close()


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
        """Return all data until the server closes."""
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
