"""Maps records of a topic to the batches of a queue, by observed metadata or by the records. Pure.

A relay stores the mapping in the metadata of its batches, which leaves the manifest together with the batch.
The last runs of records are therefore kept here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.buffer import Entry, EntryIndex, find_tag
from penstock.services import decode_run

_READ_AT_ONCE: Final = 5000
_RUNS_KEPT: Final = 20_000


class _Sequenced(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")


_SEQ: Final = msgspec.json.Decoder(_Sequenced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The records `first` to `last` of a topic, from the metadata of a relay's batch."""

    topic: str
    first: int
    last: int
    start_index: int


def run_of(start_index: int, payload: bytes) -> Run | None:
    """Decode the metadata of a relay. Return None for other metadata."""
    found = decode_run(payload)
    if found is None or found.first is None or found.last is None:
        return None
    return Run(topic=found.topic, first=found.first, last=found.last, start_index=start_index)


def sequences_in(records: Iterable[bytes]) -> list[int]:
    """Return the sequences in relayed records, or an empty list if a record has none."""
    try:
        return [_SEQ.decode(record).seq for record in records]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """The batch of a topic's record. `index` is None if the run has gaps and the index is unknown."""

    shard: int
    sequence: int
    index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRun:
    """A run of relayed records and its batch."""

    run: Run
    end: int | None
    """The index after its last record. None means the end of the batch."""
    shard: int
    sequence: int
    location: str

    def place_of(self, seq: int, end: int | None) -> Relayed:
        """Return the batch and index of the record. For a run with gaps, the index is unknown."""
        run = self.run
        is_whole = end is not None and end - run.start_index == run.last - run.first + 1
        index = run.start_index + seq - run.first if is_whole else None
        return Relayed(shard=self.shard, sequence=self.sequence, index=index)


class RelayMemory:
    """The runs observed in one queue, by application and topic."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], deque[PlacedRun]] = {}
        self._seen: dict[int, int] = {}

    def look(self, indexes: Mapping[int, EntryIndex], apps: Collection[str]) -> None:
        """Add the new entries of these applications."""
        if not apps:
            return
        for shard, index in indexes.items():
            last = index.footer.next_sequence - 1
            start = max(self._seen.get(shard, -1), last - _READ_AT_ONCE)
            for entry in index.after(start, _READ_AT_ONCE):
                self._take(shard, entry, apps)
            self._seen[shard] = last

    def _take(self, shard: int, entry: Entry, apps: Collection[str]) -> None:
        tag = find_tag(entry.tail)
        if tag is None or tag.app not in apps:
            return
        ends = [*(item.start_index for item in entry.metadata[1:]), None]
        for item, end in zip(entry.metadata, ends, strict=True):
            run = run_of(item.start_index, item.payload)
            if run is not None:
                runs = self._runs.setdefault((tag.app, run.topic), deque(maxlen=_RUNS_KEPT))
                placed = PlacedRun(
                    run=run, end=end, shard=shard, sequence=entry.sequence, location=entry.location
                )
                runs.appendleft(placed)

    def find(self, app: str, topic: str, seq: int) -> PlacedRun | None:
        """Return the newest run that contains a record, or None."""
        runs = self._runs.get((app, topic), ())
        return next((placed for placed in runs if placed.run.first <= seq <= placed.run.last), None)
