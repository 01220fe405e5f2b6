"""Which routers there are, by name and by the topics they join, and what the graph of them allows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from penstock.topics.errors import IncompatibleTopic, RouterCycle
from penstock.topics.origins import Origins
from penstock.topics.router import RouterConfig, RouterEntry, RouterState
from penstock.topics.topic import Topic

__all__ = ["Router", "RouterTable"]

_NONE: Final[tuple[Router, ...]] = ()


class Router:
    """One router between two topics that exist. `cursor` is behind nothing that is not committed."""

    __slots__ = (
        "config",
        "cursor",
        "dest",
        "dest_base",
        "forwarded_total",
        "id",
        "logged_cursor",
        "name",
        "origins",
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
        """The cursor that a start after a crash would find."""
        self.forwarded_total = entry.forwarded_total
        self.dest_base = entry.dest_base
        self.origins = Origins(dest)
        self.stopped = False

    @property
    def is_behind(self) -> bool:
        """Whether the source has records that the router has not dealt with."""
        return self.cursor < self.source.index.head_seq and not self.stopped

    def entry(self) -> RouterEntry:
        """The router as a snapshot has it."""
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
        """One more router, of a name that none has."""
        assert router.name not in self._routers
        self._routers[router.name] = router
        insort(self._names, router.name)
        source, dest = router.source.name, router.dest.name
        self._from[source] = (*self._from.get(source, ()), router)
        self._into[dest] = (*self._into.get(dest, ()), router)

    def remove(self, router: Router) -> None:
        """The router is gone."""
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
        """The routers whose source is this topic."""
        return self._from.get(topic, _NONE)

    def entering(self, topic: str) -> tuple[Router, ...]:
        """The routers whose destination is this topic."""
        return self._into.get(topic, _NONE)

    def upstream(self, topic: str) -> list[Router]:
        """Every router that what is in the topic may have come through, the farthest first."""
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
        """Raises `IncompatibleTopic` if the destination has another source, or the router other topics."""
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
        """Raises `RouterCycle` if records would come back to the source, and that is not allowed."""
        way = None if config.allow_cycle else self._way(config.dest, config.source, name)
        if way is not None:
            cycle = [config.source, *way]
            raise RouterCycle(
                f"records would go round: {' -> '.join(cycle)}; set allow_cycle if that is meant",
                {"cycle": cycle},
            )

    def _way(self, start: str, end: str, without: str) -> list[str] | None:
        """The topics from `start` to `end`, by the fewest routers; None if there is no way."""
        came_from: dict[str, str] = {start: ""}
        waiting = deque([start])
        while waiting:
            at = waiting.popleft()
            if at == end:
                way = [at]
                while came_from[way[-1]]:
                    way.append(came_from[way[-1]])
                return way[::-1]
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
        """Routers by name, and the `after` of the next page, None at the end."""
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
