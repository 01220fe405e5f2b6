"""How far each log of a running server is copied, so that the copies belong together.

Logs are read one after the other while they grow. The one of a destination may tell of copies whose originals
came into the source's log after that had been read; a start from such a backup could not make them again. So
a log is copied up to the first frame that refers to what was not read, an earlier moment of that log and as
good as any. What is cut off may itself have been referred to, so all of it is done until nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import Corrupt
from penstock.storage import LogPosition, LogScan
from penstock.topics.forward import Forward
from penstock.topics.frame import FrameType
from penstock.topics.frame_scan import read_frames
from penstock.topics.snapshot import Snapshot

__all__ = ["Agreement", "agree"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The logs as far as they are copied, and the topics whose records may be needed to make copies again."""

    logs: dict[str, LogScan]
    referred: set[int]


@dataclass(slots=True)
class _Reference:
    """A pass whose copies are made again from these records of a source."""

    log: str
    at: LogPosition
    source_id: int
    last_seq: int


def agree(logs: Mapping[str, LogScan], snapshot: Snapshot | None) -> Agreement:
    """Cut every log before the first frame that refers to records which are in no log and no segment."""
    references = [found for path, log in logs.items() for found in _references(path, log)]
    stored = {} if snapshot is None else {topic.id: topic.head_seq for topic in snapshot.topics}
    kept = dict(logs)
    while True:
        heads = _heads(kept, {one.source_id for one in references})
        dangling = [one for one in references if one.last_seq > _reach(one.source_id, heads, stored)]
        if not dangling:
            return Agreement(kept, {one.source_id for one in references})
        first = min(dangling, key=lambda one: (one.log, one.at))
        kept[first.log] = _until(kept[first.log], first.at)
        references = [one for one in references if one.log != first.log or one.at < first.at]


def _reach(source_id: int, heads: Mapping[int, int], stored: Mapping[int, int]) -> int:
    return max(heads.get(source_id, 0), stored.get(source_id, 0))


def _references(path: str, log: LogScan) -> list[_Reference]:
    found: list[_Reference] = []
    for file in log.files:
        for run in file.runs:
            table = read_frames(file.view, run.start, run.ends)
            for place in np.flatnonzero(table.heads["type"] == FrameType.ROUTER_CURSOR).tolist():
                try:
                    forward = Forward.decode(table.body(place))
                except Corrupt:
                    continue  # a start tells of it
                last_seq = max((one.source_seq + one.records - 1 for one in forward.runs), default=0)
                if not forward.by_value and last_seq:
                    at = LogPosition(file.number, int(table.starts[place]))
                    found.append(_Reference(path, at, forward.source_id, last_seq))
    return found


def _heads(logs: Mapping[str, LogScan], sources: set[int]) -> dict[int, int]:
    """The last record of each source that is in a log."""
    heads: dict[int, int] = {}
    for log in logs.values():
        for file in log.files:
            for run in file.runs:
                table = read_frames(file.view, run.start, run.ends)
                appended = table.heads[table.heads["type"] == FrameType.APPEND]
                for source in sources:
                    seqs = appended["seq"][appended["topic_id"] == source]
                    if len(seqs):
                        heads[source] = max(heads.get(source, 0), int(seqs.max()))
    return heads


def _until(log: LogScan, end: LogPosition) -> LogScan:
    """The log without what stands at `end` and behind it."""
    files = [file for file in log.files if file.number <= end.file]
    last = files[-1]
    runs = [
        replace(run, ends=run.ends[run.ends <= end.offset]) for run in last.runs if run.start < end.offset
    ]
    files[-1] = replace(last, runs=runs, end=end.offset, torn=True)
    return replace(log, files=files)
