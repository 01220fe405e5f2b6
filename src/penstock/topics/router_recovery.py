"""Which routers there were, from a snapshot and the frames behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from penstock.errors import Corrupt
from penstock.topics.forward import Forward
from penstock.topics.frame import FrameType
from penstock.topics.frame_scan import FrameTable
from penstock.topics.router import RouterEntry, decode_created
from penstock.topics.topic import Topic

__all__ = ["RouterRecovery"]


class RouterRecovery:
    """Collects what frames say of routers; `found` is what is true in the end."""

    def __init__(self, entries: Iterable[RouterEntry]) -> None:
        self._entries = {entry.id: entry for entry in entries}
        self._gone: set[int] = set()
        self._passes: dict[int, Forward] = {}
        self.sources: set[int] = set()
        """The ids of topics that copies have to be made of again."""
        self.lowered = False
        """Whether a source has fewer records than its router had seen; see `found`."""
        self.problems: list[str] = []

    @property
    def ids(self) -> set[int]:
        """Every number that a router has or had."""
        return self._entries.keys() | self._gone | self._passes.keys()

    def feeds(self, topic_id: int) -> bool:
        """Whether a router copies, or copied, into this topic."""
        return any(entry.dest_id == topic_id for entry in self._entries.values())

    def read(self, frames: FrameTable) -> None:
        """Frames that belong to no topic, in the order in which they were written."""
        kinds, ids = frames.heads["type"], frames.heads["seq"]
        for place in np.flatnonzero((kinds == FrameType.ROUTER_CREATE) | (kinds == FrameType.ROUTER_DELETE)):
            router_id = int(ids[place])
            if kinds[place] == FrameType.ROUTER_DELETE:
                self._gone.add(router_id)
                continue
            try:
                told = decode_created(router_id, frames.body(int(place)))
            except Corrupt as error:
                self.problems.append(f"a router is lost: {error}")
                continue
            known = self._entries.get(router_id)
            if known is not None:
                told = _advanced(told, known.cursor, known.forwarded_total)
            self._entries[router_id] = told

    def note(self, forward: Forward) -> None:
        """A pass, in the order of its destination's log."""
        self._passes[forward.router_id] = forward
        if not forward.by_value:
            self.sources.add(forward.source_id)

    def found(self, topics: Mapping[int, Topic]) -> list[RouterEntry]:
        """The routers between these topics, which are as they were before the start.

        A source that promises nothing may have lost records that were copied. Its next ones get their
        numbers, so the cursor goes back; until a snapshot says so, the log would take it forward again.
        """
        found: dict[str, RouterEntry] = {}
        for router_id, entry in sorted(self._entries.items()):
            source, dest = topics.get(entry.source_id), topics.get(entry.dest_id)
            if router_id in self._gone or source is None or dest is None:
                continue
            last = self._passes.get(router_id)
            if last is not None:
                entry = _advanced(entry, last.cursor, last.forwarded_total)
            if entry.cursor > source.index.head_seq:
                self.lowered = True
                entry = msgspec.structs.replace(entry, cursor=source.index.head_seq)
            found[entry.name] = entry
        return list(found.values())


def _advanced(entry: RouterEntry, cursor: int, forwarded_total: int) -> RouterEntry:
    """The entry at least so far."""
    return msgspec.structs.replace(
        entry,
        cursor=max(entry.cursor, cursor),
        forwarded_total=max(entry.forwarded_total, forwarded_total),
    )
