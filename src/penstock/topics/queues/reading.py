"""Reads of chosen records as JSON objects, from any tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from penstock.storage import FileView
from penstock.topics.errors import Damaged
from penstock.topics.log.frame import HEADER_BYTES
from penstock.topics.read.render import Frames, Style, is_log_frame, render, render_one
from penstock.topics.segments.columns import DAMAGED, NO_FILE, Columns, Places, StoredBytes, span
from penstock.topics.topic.topic import Topic
from penstock.topics.workers import Workers

_FEW: Final = 8
"""The number of rows up to which a plain loop is faster than arrays."""
_RANGE_BYTES_MAX: Final = 4 * 1024**2
_NOTHING: Final = memoryview(b"")


async def read_jobs(
    topic: Topic, seqs: Sequence[int], style: Style, workers: Workers
) -> tuple[dict[int, bytes], list[int]]:
    """Return a fragment for every live record, and the numbers of unreadable ones.

    Raises `Unavailable` if the cold tier does not respond.
    """
    found: dict[int, bytes] = {}
    bad: list[int] = []
    waiting = [list(seqs)]
    while waiting:
        # A record's location is valid only until the next wait: a checkpoint may move it.
        cold = _read_available(topic, waiting.pop(), style, found, bad)
        waiting += [(places + run.first_seq).tolist() for run, places in cold[1:]]
        if cold:
            await _read_cold(topic, *cold[0], style, workers, found, bad)
    return found, bad


def _read_available(
    topic: Topic, seqs: Sequence[int], style: Style, found: dict[int, bytes], bad: list[int]
) -> list[tuple[Columns, Places]]:
    """Read the available records. Return the others, grouped by ranges of a cold segment."""
    cold: list[tuple[Columns, Places]] = []
    for run, places in _by_run(topic, seqs):
        for file, part in _by_file(run, places):
            view: StoredBytes | None = _NOTHING if file == NO_FILE else topic.log.view(run, file)
            if view is None:
                cold += [(run, near) for near in _near(run, np.array(part, np.int64))]
            else:
                _read(Frames(run, view), part, style, found, bad)
    return cold


def _by_run(topic: Topic, seqs: Iterable[int]) -> list[tuple[Columns, list[int]]]:
    """Return the rows of each run. Sequence numbers that are not live are omitted."""
    parts: list[tuple[Columns, list[int]]] = []
    for seq in seqs:
        located = topic.log.index.locate(seq)
        if located is None:
            continue
        run, place = located
        if parts and parts[-1][0] is run:
            parts[-1][1].append(place)
        else:
            parts.append((run, [place]))
    return parts


def _by_file(run: Columns, places: list[int]) -> list[tuple[int, list[int]]]:
    parts: list[tuple[int, list[int]]] = []
    stop = -1
    for place in places:
        if place >= stop:
            file, stop = run.file_of(place)
            parts.append((file, []))
        parts[-1][1].append(place)
    return parts


def _read(frames: Frames, places: list[int], style: Style, found: dict[int, bytes], bad: list[int]) -> None:
    run = frames.run
    if len(places) <= _FEW and not run.segment:
        _read_few(run, frames.view, places, style, found, bad)
        return
    while places:
        out: list[bytes] = []
        failed = render(frames, np.array(places, np.int64), style, out)
        found |= {run.first_seq + place: fragment for place, fragment in zip(places, out, strict=False)}
        if failed is None:
            return
        bad.append(failed.seq)
        places = places[len(out) + 1 :]


def _read_few(
    run: Columns,
    view: StoredBytes,
    places: list[int],
    style: Style,
    found: dict[int, bytes],
    bad: list[int],
) -> None:
    for place in places:
        offset, length, ts_ms, flags, _ = run.row(place)
        seq = run.first_seq + place
        if flags & DAMAGED or length < HEADER_BYTES or offset + length > len(view):
            bad.append(seq)
            continue
        frame = span(view, offset, offset + length)
        if isinstance(view, FileView) and not is_log_frame(frame, seq):
            bad.append(seq)
        else:
            found[seq] = render_one(frame, seq, ts_ms, flags, style)


async def _read_cold(
    topic: Topic,
    run: Columns,
    places: Places,
    style: Style,
    workers: Workers,
    found: dict[int, bytes],
    bad: list[int],
) -> None:
    segment = topic.log.segment_of(run)
    start = int(run.offset[places[0]])
    stop = int(run.offset[places[-1]]) + int(run.length[places[-1]])
    try:
        data = await workers.fetch(lambda: segment.read_bytes(start, stop))
    except Damaged:
        bad += (places + run.first_seq).tolist()
    else:
        _read(Frames(run, data, start), places.tolist(), style, found, bad)


def _near(run: Columns, places: Places) -> Iterable[Places]:
    """Split the rows into parts that each lie within one range, so that few reads fetch little."""
    starts = run.offset[places].astype(np.int64)
    at = 0
    while at < len(places):
        stop = int(np.searchsorted(starts, int(starts[at]) + _RANGE_BYTES_MAX, side="left"))
        yield places[at : max(stop, at + 1)]
        at = max(stop, at + 1)
