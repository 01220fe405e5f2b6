"""Following topics without an event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from penstock.blocking import LoopThread
from penstock.topics.client.events import WatchEvent
from penstock.topics.client.pull import pull
from penstock.topics.client.watch_calls import WatchCalls
from penstock.topics.model import Predicate

__all__ = ["BlockingWatchCalls"]


class BlockingWatchCalls:
    """Blocking twin of `WatchCalls`."""

    _loop: LoopThread
    _inner: WatchCalls

    def watch(
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
    ) -> Iterator[WatchEvent]:
        """What happens in these topics, as it happens."""
        return pull(
            self._loop,
            self._inner.watch(
                topics,
                node=node,
                limit=limit,
                max_batch_bytes=max_batch_bytes,
                heartbeat_ms=heartbeat_ms,
                include_tags=include_tags,
                include_meta=include_meta,
                include_data=include_data,
                match=match,
            ),
        )
