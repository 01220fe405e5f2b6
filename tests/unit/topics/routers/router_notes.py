"""A record of the calls on routed topics and their results, and the invariants that must hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.unit.topics.engine_doubles import read_all, rec

from penstock.errors import PenstockError
from penstock.topics import Durability, Engine, RouterConfig, TopicConfig

F, D, M, E = Durability.FSYNC, Durability.DISK, Durability.MEMORY, Durability.EPHEMERAL
TOPICS = {
    "f": TopicConfig(durability=F),
    "d": TopicConfig(durability=D),
    "e": TopicConfig(durability=E),
    "m": TopicConfig(durability=M),
    "cap": TopicConfig(durability=F, cap_records=2),
    "f2f": TopicConfig(durability=F),
    "f2d": TopicConfig(durability=D),
    "d2f": TopicConfig(durability=F),
    "d2d": TopicConfig(durability=D),
    "e2f": TopicConfig(durability=F),
    "m2d": TopicConfig(durability=D),
    "cap2f": TopicConfig(durability=F),
    "f2f2f": TopicConfig(durability=F),
}
ROUTES = {
    "f2f": "f",
    "f2d": "f",
    "d2f": "d",
    "d2d": "d",
    "e2f": "e",
    "m2d": "m",
    "cap2f": "cap",
    "f2f2f": "f2f",
}
"""The source of each destination."""
SOURCES = ["f", "d", "e", "m", "cap"]


@dataclass
class Notes:
    """The events so far."""

    count: int = 0
    acked: dict[str, list[str]] = field(default_factory=dict)
    """Values that were written to a topic, in order. Values of failed writes are only in `tried`."""
    tried: dict[str, list[str]] = field(default_factory=dict)
    seen: dict[str, dict[int, str]] = field(default_factory=dict)
    maybe_deleted: dict[str, set[int]] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    """The destinations whose routers are acknowledged."""

    late: set[str] = field(default_factory=set)
    """The destinations among them whose sources had earlier records."""

    async def make(self, engine: Engine) -> None:
        """Create the topics and routers that do not exist yet."""
        for name, config in TOPICS.items():
            await engine.put_topic(name, config)
        for dest, source in ROUTES.items():
            put = await engine.put_router(f"to-{dest}", RouterConfig(source=source, dest=dest))
            if put.created and self.tried.get(self._root(source)):
                self.late.add(dest)
            self.made.add(dest)

    async def write(self, engine: Engine, topic: str, count: int = 1) -> None:
        self.count += 1
        values = [f"{topic}:{self.count}.{place}" for place in range(count)]
        self.tried.setdefault(topic, []).extend(values)
        await engine.write(topic, [rec(value) for value in values], create=False)
        self.acked.setdefault(topic, []).extend(values)

    async def look(self, engine: Engine, dest: str) -> dict[int, str]:
        found = {seq: str(value) for seq, value in (await read_all(engine, dest)).items()}
        self.seen.setdefault(dest, {}).update(found)
        return found

    async def delete(self, engine: Engine, topic: str, before_seq: int) -> None:
        """Read the copies first, because a record that is removed before its copy need not be copied."""
        for dest, source in ROUTES.items():
            if source == topic:
                await self.look(engine, dest)
        self.maybe_deleted.setdefault(topic, set()).update(range(1, before_seq))
        await engine.delete(topic, before_seq=before_seq)

    # ---- what follows --------------------------------------------------------------------------------

    async def check(self, engine: Engine, *, power_cut: bool) -> None:
        assert engine.problems == []
        for dest in self.made:
            await self._check_dest(engine, dest, power_cut=power_cut)

    async def _check_dest(self, engine: Engine, dest: str, *, power_cut: bool) -> None:
        source = ROUTES[dest]
        found = {seq: str(value) for seq, value in (await read_all(engine, dest)).items()}
        gone = self.maybe_deleted.get(dest, set())
        seen = {seq: value for seq, value in self.seen.get(dest, {}).items() if seq not in gone}
        is_kept = TOPICS[dest].durability is F or not power_cut
        for seq, value in seen.items():
            now = found.get(seq)
            assert now == value or (now is None and not is_kept), f"{dest} {seq} was {value} and is {now}"
        # Records lost in a power cut are not expected again, and must not come back as other records.
        self.seen[dest] = {seq: value for seq, value in self.seen.get(dest, {}).items() if seq in found}
        values = list(found.values())
        assert len(set(values)) == len(values), f"{dest}: a record is there twice: {values}"
        self._check_order(dest, source, values)
        there = {str(value) for value in (await read_all(engine, source)).values()}
        missing = there - set(values)
        assert gone or dest in self.late or not missing, f"{dest}: {sorted(missing)} were not copied"

    def _check_order(self, dest: str, source: str, values: list[str]) -> None:
        roots = [value for value in values if value.startswith(f"{self._root(source)}:")]
        known = self.tried.get(self._root(source), [])
        assert set(roots) <= set(known), f"{dest}: nobody wrote {set(roots) - set(known)}"
        assert roots == sorted(roots, key=known.index), f"{dest} is out of order: {roots}"

    def _root(self, topic: str) -> str:
        while topic in ROUTES:
            topic = ROUTES[topic]
        return topic

    async def picture(self, engine: Engine) -> dict[str, object]:
        """Return everything that a reader can see after the routers have finished."""
        seen: dict[str, object] = {}
        for dest in ROUTES:
            await engine.drain(dest)
        for state in engine.topics(limit=1000)[0]:
            name = state.topic
            records = await read_all(engine, name)
            seen[name] = (state.count, state.bytes, records)
            if state.config.durable:
                # The head of other topics advances to the reservation when something is copied after a start.
                cursors = {0, 1, 4, max(state.earliest_seq - 2, 0), state.head_seq}
                tombstones = [(await engine.diff(name, cursor)).tombstone for cursor in sorted(cursors)]
                seen[name] = (state.head_seq, state.bytes, records, tombstones)
        for router in engine.routers(limit=1000)[0]:
            seen[router.router] = (router.config, router.forwarded_total)
        return seen


async def attempt(call: object) -> bool:
    """Return whether it succeeded."""
    try:
        await call  # type: ignore[misc]
    except PenstockError:
        return False
    return True
