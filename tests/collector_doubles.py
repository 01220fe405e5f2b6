"""A Quiver in memory, and an OTLP server with the responses that a test chooses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pyarrow as pa

from penstock.collector.receiver_grpc import METHODS
from penstock.otlp.schema import Signal
from penstock.quiver import Subscriber

RAW_SLOTS = {"logs": 60, "traces": 61, "metrics": 62}
FLAT_SLOTS = {"traces": 50, "logs": 51, "metrics": 52}


@dataclass(frozen=True)
class Ref:
    segment_seq: int
    bundle: int


@dataclass
class Bundle:
    batch: pa.RecordBatch
    signal: str
    slot: int
    ref: Ref
    queue: MemoryStore
    items: int = 1
    attempt: int = 1
    outcomes: list[tuple[str, object, object]] = field(default_factory=list)

    def ack(self) -> bool:
        return self._settle("ack", None, None)

    def nack(self, reason: str = "", retry_after: float | None = None) -> bool:
        self.queue.put_back(self)
        return self._settle("nack", reason, retry_after)

    def reject(self, reason: str = "") -> bool:
        return self._settle("reject", reason, None)

    def defer(self, delay: float | None = None) -> bool:
        self.queue.put_back(self)
        return self._settle("defer", delay, None)

    def _settle(self, what: str, reason: object, extra: object) -> bool:
        self.outcomes.append((what, reason, extra))
        self.queue.log.append((what, self.ref, reason, extra))
        return True


class MemoryStore:
    """An `AsyncQuiver` with one subscriber; `fail` makes the next ingest raise."""

    def __init__(self) -> None:
        self.pending: deque[Bundle] = deque()
        self.stored: list[Bundle] = []
        self.log: list[tuple[str, Ref, object, object]] = []
        self.fail: Exception | None = None
        self.flushed = self.closed = False
        self._arrived = asyncio.Event()

    async def ingest(self, batch: pa.RecordBatch, *, signal: str) -> None:
        self._put(batch, signal, FLAT_SLOTS[signal])

    async def ingest_raw(self, data: bytes, signal: str) -> None:
        batch = pa.record_batch([pa.array([data], pa.binary())], names=["data"])
        self._put(batch, signal, RAW_SLOTS[signal])

    def _put(self, batch: pa.RecordBatch, signal: str, slot: int) -> None:
        if self.fail is not None:
            raise self.fail
        ref = Ref(len(self.stored) // 4 + 1, len(self.stored) % 4)
        bundle = Bundle(batch, signal, slot, ref, self)
        self.stored.append(bundle)
        self.pending.append(bundle)
        self._arrived.set()

    def put_back(self, bundle: Bundle) -> None:
        bundle.attempt += 1
        self.pending.append(bundle)
        self._arrived.set()

    async def next_bundle(self, subscriber: str, timeout: float | None = None) -> Bundle | None:
        if not self.pending and timeout:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout)
            except TimeoutError:
                return None
        return self.pending.popleft() if self.pending else None

    def subscribers(self) -> list[Subscriber]:
        return []

    async def flush(self) -> None:
        self.flushed = True

    async def close(self) -> None:
        self.closed = True

    def outcomes(self, what: str) -> int:
        return sum(entry[0] == what for entry in self.log)


Answer = Callable[[bytes, Signal, "grpc.aio.ServicerContext"], Awaitable[bytes]]


class GrpcBackend:
    """An OTLP server; `answer` is called indefinitelyy request."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.requests: list[tuple[Signal, bytes]] = []
        self.metadata: list[Sequence[tuple[str, str]]] = []
        self.answer = answer
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> GrpcBackend:
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def __aenter__(self) -> GrpcBackend:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, backend: GrpcBackend) -> None:
        self._backend = backend

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        signal = METHODS[handler_call_details.method]
        backend = self._backend

        async def export(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            backend.metadata.append(tuple(context.invocation_metadata()))
            answer = b"" if backend.answer is None else await backend.answer(request, signal, context)
            backend.requests.append((signal, request))
            return answer

        return grpc.unary_unary_rpc_method_handler(export)


__all__ = ["Answer", "Bundle", "GrpcBackend", "MemoryStore", "Ref"]
