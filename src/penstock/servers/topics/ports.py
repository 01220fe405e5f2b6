"""What the API asks of an engine; `penstock.topics.Engine` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import PenstockError
from penstock.topics import (
    AckResult,
    BareRecord,
    ClaimResult,
    DeleteResult,
    EngineStats,
    ExtendResult,
    Feed,
    NackResult,
    Page,
    Predicate,
    PutResult,
    RemoveResult,
    RouterConfig,
    RouterPut,
    RouterRemoved,
    RouterState,
    Scheduler,
    TopicConfig,
    TopicState,
    WorkStream,
    WriteResult,
)


class TopicsEngine(Protocol):
    """The engine as the API uses it."""

    @property
    def ready(self) -> bool: ...
    @property
    def replay_progress(self) -> float: ...
    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def topic_count(self) -> int: ...
    async def check_writable(self) -> None: ...
    async def put_topic(self, name: str, config: TopicConfig) -> PutResult: ...
    def state(self, name: str, *, touch: bool = True) -> TopicState: ...
    def topics(
        self,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = 100,
        touch: bool = False,
        allowed: Callable[[str], bool] | None = None,
    ) -> tuple[list[TopicState], str | None]: ...
    async def remove_topic(self, name: str, *, if_empty: bool = False) -> RemoveResult: ...
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
    ) -> WriteResult: ...
    def begin_write(
        self,
        name: str,
        records: Sequence[BareRecord],
        done: Callable[[WriteResult | PenstockError], None],
        *,
        node: str | None = None,
        parsed: bool = False,
        insist: bool = False,
    ) -> bool: ...
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
    ) -> Page: ...
    async def delete(
        self, name: str, *, before_seq: int | None = None, match: Predicate | None = None
    ) -> DeleteResult: ...
    def feed(self, name: str) -> Feed: ...
    def on_topic(self, tell: Callable[[str], None]) -> None: ...
    async def claim(
        self, name: str, node: str, *, max: int = 1, lease_ms: int | None = None
    ) -> ClaimResult: ...
    async def ack(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str] = ()
    ) -> AckResult: ...
    async def nack(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str] = (), *, delay_ms: int = 0
    ) -> NackResult: ...
    async def extend(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str] = (), *, lease_ms: int
    ) -> ExtendResult: ...
    async def work(
        self, name: str, node: str, *, max: int = 1, lease_ms: int | None = None
    ) -> WorkStream: ...
    def exists(self, name: str) -> bool: ...
    def is_fed(self, name: str) -> bool: ...
    async def drain(self, name: str) -> None: ...
    async def put_router(self, name: str, config: RouterConfig) -> RouterPut: ...
    async def remove_router(self, name: str) -> RouterRemoved: ...
    async def router(self, name: str, *, drain: bool = True) -> RouterState: ...
    def routers(
        self,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = 100,
        source: str | None = None,
        dest: str | None = None,
        allowed: Callable[[RouterState], bool] | None = None,
    ) -> tuple[Sequence[RouterState], str | None]: ...
    @property
    def router_count(self) -> int: ...
    def stats(self) -> EngineStats: ...
