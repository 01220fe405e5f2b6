"""The routers by name and by topic, and the checks on their graph."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

import msgspec
import numpy as np

from penstock.jsontext import shallow
from penstock.topics.errors import IncompatibleTopic, RouterCycle
from penstock.topics.log.payload import split_payload
from penstock.topics.routers.copy_frame import ROUTER_KEY, CopyStyle, key_of, stored_records
from penstock.topics.routers.model import RouterConfig, RouterEntry, RouterState
from penstock.topics.segments.format import HAS_META
from penstock.topics.topic.topic import Topic

_MARK: Final = ROUTER_KEY.encode()
_ORIGIN_LEVELS: Final = 2
"""The nesting depth at which an origin is found: an object in an object."""


class _Origin(msgspec.Struct):
    idempotency_key: str
    source_seq: int


class _Meta(msgspec.Struct, rename={"origin": ROUTER_KEY}):
    origin: _Origin


_META: Final = msgspec.json.Decoder(_Meta)


class DedupWindow:
    """Origins that reached a destination before their copy was made. An `exactly_once` router skips them.

    A router's own copies carry origins at or below its cursor. Only a client that writes to the destination
    directly, or another router, can add a higher one. So each record that the router did not write is
    examined once, if it has meta. After a start, only the destination's log is examined, whose size
    checkpoints limit. Records that are already in segments are not searched again.
    """

    __slots__ = ("_order", "_places", "_seen_seq")

    def __init__(self, dest: Topic) -> None:
        self._seen_seq = dest.log.index.first_log_seq - 1
        self._places: dict[int, int] = {}
        """The position in the destination of the origin of a source record."""
        self._order: list[int] = []
        """The same source records, as a heap."""

    def passed(self, dest: Topic, cursor: int) -> None:
        """Mark the destination's head as written by the router, and drop origins up to its cursor."""
        self._seen_seq = dest.log.index.head_seq
        while self._order and self._order[0] <= cursor:
            self._places.pop(heappop(self._order), None)

    def look(self, dest: Topic, style: CopyStyle) -> None:
        """Examine the records that arrived in the destination since the last call."""
        index = dest.log.index
        at = max(self._seen_seq + 1, index.earliest_seq)
        self._seen_seq = max(self._seen_seq, index.head_seq)
        while (found := index.run_from(at)) is not None:
            run, start = found
            file, stop = run.file_of(start)
            view = dest.log.view(run, file)
            if view is not None:
                with_meta = run.is_live(start, stop) & ((run.flags[start:stop] & HAS_META) != 0)
                places: list[int] = (start + np.flatnonzero(with_meta)).tolist()
                for place, stored in zip(places, stored_records(run, places, view), strict=True):
                    if stored is not None and _MARK in stored.payload:
                        self._note(run.first_seq + place, stored.payload, style)
            at = run.first_seq + stop

    def _note(self, seq: int, payload: bytes, style: CopyStyle) -> None:
        meta = split_payload(payload)[1]
        try:
            origin = _META.decode(shallow(meta or b"", _ORIGIN_LEVELS).text).origin
        except msgspec.MsgspecError:
            return  # the text occurs elsewhere and is not an origin
        if origin.idempotency_key == key_of(origin.source_seq, style):
            if origin.source_seq not in self._places:
                heappush(self._order, origin.source_seq)
            self._places[origin.source_seq] = seq

    def takes(self, source_seq: int, dest: Topic) -> bool:
        """Return whether the destination has this record as a live one. A failed pass checks again."""
        place = self._places.get(source_seq)
        return place is not None and dest.log.index.locate(place) is not None


_NONE: Final[tuple[Router, ...]] = ()


class Router:
    """One router between two existing topics. `cursor` covers only committed copies."""

    __slots__ = (
        "config",
        "cursor",
        "dedup_window",
        "dest",
        "dest_base",
        "forwarded_total",
        "id",
        "logged_cursor",
        "name",
        "source",
        "stopped",
    )

    def __init__(self, entry: RouterEntry, source: Topic, dest: Topic) -> None:
        self.id = entry.id
        self.name = entry.name
        self.config = entry.config
        self.source = source
        self.dest = dest
        self.cursor = entry.cursor
        self.logged_cursor = entry.cursor
        """The cursor after a crash."""
        self.forwarded_total = entry.forwarded_total
        self.dest_base = entry.dest_base
        self.dedup_window = DedupWindow(dest)
        self.stopped = False

    @property
    def is_behind(self) -> bool:
        """Return whether the source has records that the router has not processed."""
        return self.cursor < self.source.log.index.head_seq and not self.stopped

    def entry(self) -> RouterEntry:
        """Return the router for a snapshot."""
        match = self.config.filter
        return RouterEntry(
            id=self.id,
            name=self.name,
            source=self.source.name,
            source_id=self.source.id,
            dest=self.dest.name,
            dest_id=self.dest.id,
            bits=self.config.bits,
            match=None if match is None else (match.value, match.is_prefix),
            cursor=self.cursor,
            forwarded_total=self.forwarded_total,
            dest_base=self.dest_base,
        )

    def state(self) -> RouterState:
        return RouterState(router=self.name, config=self.config, forwarded_total=self.forwarded_total)


class RouterTable:
    """All routers of an engine."""

    def __init__(self) -> None:
        self._routers: dict[str, Router] = {}
        self._names: list[str] = []
        self._from: dict[str, tuple[Router, ...]] = {}
        self._into: dict[str, tuple[Router, ...]] = {}

    def __len__(self) -> int:
        return len(self._routers)

    def __iter__(self) -> Iterator[Router]:
        return iter(self._routers.values())

    def find(self, name: str) -> Router | None:
        return self._routers.get(name)

    def add(self, router: Router) -> None:
        """Add a router with a new name."""
        assert router.name not in self._routers
        self._routers[router.name] = router
        insort(self._names, router.name)
        source, dest = router.source.name, router.dest.name
        self._from[source] = (*self._from.get(source, ()), router)
        self._into[dest] = (*self._into.get(dest, ()), router)

    def remove(self, router: Router) -> None:
        router.stopped = True
        del self._routers[router.name]
        del self._names[bisect_left(self._names, router.name)]
        for table, topic in ((self._from, router.source.name), (self._into, router.dest.name)):
            left = tuple(other for other in table[topic] if other is not router)
            if left:
                table[topic] = left
            else:
                del table[topic]

    def leaving(self, topic: str) -> tuple[Router, ...]:
        """Return the routers whose source is this topic."""
        return self._from.get(topic, _NONE)

    def entering(self, topic: str) -> tuple[Router, ...]:
        """Return the routers whose destination is this topic."""
        return self._into.get(topic, _NONE)

    def upstream(self, topic: str) -> list[Router]:
        """Return every router that records of the topic may have passed, the farthest first."""
        found: dict[str, Router] = {}
        waiting = deque([topic])
        seen = {topic}
        while waiting:
            for router in self.entering(waiting.popleft()):
                found[router.name] = router
                if router.source.name not in seen:
                    seen.add(router.source.name)
                    waiting.append(router.source.name)
        return list(reversed(found.values()))

    def check(self, name: str, config: RouterConfig) -> None:
        """Raise `IncompatibleTopic` if the destination has another source, or the router other topics."""
        for other in self.entering(config.dest):
            if other.name != name and other.source.name != config.source:
                raise IncompatibleTopic(
                    f'topic "{config.dest}" already has its records from "{other.source.name}"; '
                    "a destination has one source",
                    {"topic": config.dest, "reason": "router_dest_fan_in"},
                )
        known = self._routers.get(name)
        if known is not None and (known.source.name, known.dest.name) != (config.source, config.dest):
            raise IncompatibleTopic(
                f'router "{name}" leads from "{known.source.name}" to "{known.dest.name}"; '
                "delete it first, or use another name",
                {
                    "router": name,
                    "reason": "router_repoint_forbidden",
                    "existing_source": known.source.name,
                    "existing_dest": known.dest.name,
                },
            )

    def check_cycle(self, name: str, config: RouterConfig) -> None:
        """Raise `RouterCycle` if records would return to the source and the config does not allow it."""
        path = None if config.allow_cycle else self._path(config.dest, config.source, name)
        if path is not None:
            cycle = [config.source, *path]
            raise RouterCycle(
                f"records would go round: {' -> '.join(cycle)}; set allow_cycle if that is meant",
                {"cycle": cycle},
            )

    def _path(self, start: str, end: str, without: str) -> list[str] | None:
        """Return the topics from `start` to `end` by the fewest routers, or None if there is no path."""
        came_from: dict[str, str] = {start: ""}
        waiting = deque([start])
        while waiting:
            at = waiting.popleft()
            if at == end:
                path = [at]
                while came_from[path[-1]]:
                    path.append(came_from[path[-1]])
                return path[::-1]
            for router in self.leaving(at):
                after = router.dest.name
                if router.name != without and after not in came_from:
                    came_from[after] = at
                    waiting.append(after)
        return None

    def page(
        self,
        *,
        prefix: str,
        after: str,
        limit: int,
        source: str | None,
        dest: str | None,
        allowed: Callable[[RouterState], bool] | None,
    ) -> tuple[Sequence[RouterState], str | None]:
        """Return routers by name, and the `after` of the next page or None at the end."""
        found: list[RouterState] = []
        start = max(bisect_left(self._names, prefix), bisect_right(self._names, after) if after else 0)
        for name in self._names[start:]:
            if not name.startswith(prefix):
                break
            router = self._routers[name]
            if source not in (None, router.source.name) or dest not in (None, router.dest.name):
                continue
            state = router.state()
            if allowed is not None and not allowed(state):
                continue
            if len(found) == limit:
                return found, found[-1].router
            found.append(state)
        return found, None
