"""What the API asks of an engine; `penstock.topics.Engine` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.topics.config import TopicConfig
from penstock.topics.model import (
    DeleteResult,
    NewRecord,
    Page,
    Predicate,
    PutResult,
    RemoveResult,
    TopicState,
    WriteResult,
)
from penstock.topics.stats import EngineStats

__all__ = ["TopicsEngine"]


class TopicsEngine(Protocol):
    """The engine as the API uses it."""

    @property
    def ready(self) -> bool: ...
    @property
    def replay_progress(self) -> float: ...
    @property
    def topic_count(self) -> int: ...
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
        records: Sequence[NewRecord],
        *,
        node: str | None = None,
        idempotency_key: str | None = None,
        create: bool | None = None,
        config: TopicConfig | None = None,
        parsed: bool = False,
    ) -> WriteResult: ...
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
    ) -> Page: ...
    async def delete(
        self, name: str, *, before_seq: int | None = None, match: Predicate | None = None
    ) -> DeleteResult: ...
    def exists(self, name: str) -> bool: ...
    def stats(self) -> EngineStats: ...
