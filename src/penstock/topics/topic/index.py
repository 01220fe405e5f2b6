"""The index of a topic: which records are live, and where their bytes are.

Sequence numbers are dense, so the index is an ordered list of runs of rows, not a map. Segments come first,
then rows that point into the log. Every record below `earliest_seq` is gone. Above it, a row is live unless
it is flagged. A sequence number outside all runs never had a record, or its run was dropped when no record in
it was live. Counts and bytes are always exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.topics.log.frame import EncodedBatch
from penstock.topics.segments.columns import DAMAGED, DEAD, DELETED, NO_FILE, Columns, Places, pack_row
from penstock.topics.segments.format import HOLE

RUN_ROWS_MAX: Final = 16_384
"""The rows at which a run of log rows is closed.

Growth copies the run, and only a whole run can be dropped.
"""
HOLE_ROWS_MAX: Final = 4096
"""The largest hole in the sequence numbers that may become rows of a segment."""
_WINDOW: Final = 4096
_FEW: Final = 8

Seqs = npt.NDArray[np.uint64]


class Removed(NamedTuple):
    """Removed records: how many were live, their accounted bytes, and the number after the last one."""

    records: int = 0
    bytes: int = 0
    end_seq: int = 0


NOTHING: Final = Removed()


class TopicIndex:
    """The rows of one topic. Used on one thread; no method waits or reads a clock."""

    __slots__ = ("_runs", "_starts", "earliest_seq", "head_seq", "live", "live_bytes", "picked")

    def __init__(self, head_seq: int = 0) -> None:
        self.head_seq = head_seq
        self.earliest_seq = head_seq + 1
        """The first live record, or `head_seq + 1` if there is none."""
        self.live = 0
        self.live_bytes = 0
        self.picked = 0
        """The number of records that were deleted individually instead of as part of a prefix."""
        self._runs: list[Columns] = []
        self._starts: list[int] = []

    @property
    def base_seq(self) -> int:
        """Return the first sequence number that still has a row."""
        return self._starts[0] if self._starts else self.head_seq + 1

    @property
    def runs(self) -> tuple[Columns, ...]:
        """Return all runs in order of their sequence numbers."""
        return tuple(self._runs)

    # ---- growing -------------------------------------------------------------------------------------

    def append(self, batch: EncodedBatch, *, file: int, base: int) -> None:
        """Append the records of one write, whose frames start at offset `base` of a log file."""
        assert batch.first_seq == self.head_seq + 1, "a write continues where the last one ended"
        run = self._open_run()
        run.append_rows(file, base, batch.rows)
        self._grown(run, batch.count, batch.accounted_bytes)

    def append_rows(self, rows: bytes, *, file: int, base: int = 0) -> None:
        """Append rows that recovery found. Rows with a dead flag are not counted as live."""
        run = self._open_run()
        before = run.count
        run.append_rows(file, base, rows)
        alive = run.is_live(before, run.count)
        size = int(run.accounted(before, run.count)[alive].sum(dtype=np.uint64))
        added = run.count - before
        self._grown(run, int(np.count_nonzero(alive)), size, added)
        if self.earliest_seq > self.head_seq - added:
            self._seek(self.earliest_seq)

    def append_damaged(self, count: int, ts_ms: int) -> None:
        """Append `count` unreadable records. A reader gets an error for each of them."""
        self.append_rows(pack_row(0, 0, ts_ms, DAMAGED, 0) * count, file=NO_FILE)

    def skip_to(self, head_seq: int) -> None:
        """Advance the head to `head_seq` without adding records."""
        if head_seq > self.head_seq:
            if self.earliest_seq > self.head_seq:
                self.earliest_seq = head_seq + 1
            self.head_seq = head_seq

    def add_run(self, run: Columns) -> None:
        """Append a segment that was found at the start, after all existing runs."""
        assert not self._runs or run.first_seq >= self._runs[-1].end_seq, "runs are added in order"
        run.recount(self.earliest_seq if self.live else 0)
        self._runs.append(run)
        self._starts.append(run.first_seq)
        empty = not self.live
        self.live += run.live
        self.live_bytes += run.live_bytes
        self.head_seq = max(self.head_seq, run.end_seq - 1)
        if empty:
            self._seek(run.first_seq)

    def _open_run(self) -> Columns:
        if self._runs:
            last = self._runs[-1]
            if not last.segment and last.end_seq == self.head_seq + 1 and last.count < RUN_ROWS_MAX:
                return last
        run = Columns(self.head_seq + 1)
        self._runs.append(run)
        self._starts.append(run.first_seq)
        return run

    def _grown(self, run: Columns, live: int, size: int, added: int | None = None) -> None:
        run.live += live
        run.live_bytes += size
        self.live += live
        self.live_bytes += size
        self.head_seq += live if added is None else added

    # ---- removal from the front ----------------------------------------------------------------------

    def evict_to_count(self, cap: int) -> Removed:
        """Remove the oldest live records until `cap` are left."""
        excess = self.live - cap
        if excess <= 0:
            return NOTHING
        if excess <= _FEW:
            return self._pop(excess)
        count = size = end_seq = 0
        for run, places in self._live_windows():
            taken = places[: excess - count]
            size += self._consume(run, taken)
            count += len(taken)
            end_seq = run.first_seq + int(taken[-1]) + 1
            if count == excess:
                break
        self._seek(end_seq)
        return Removed(count, size, end_seq)

    def evict_to_bytes(self, cap: int) -> Removed:
        """Remove the oldest live records until their accounted bytes are at most `cap`."""
        excess = self.live_bytes - cap
        if excess <= 0:
            return NOTHING
        count = size = end_seq = 0
        for run, places in self._live_windows():
            sums = np.cumsum(_sizes(run, places), dtype=np.uint64)
            taken = places[: int(np.searchsorted(sums, np.uint64(excess - size))) + 1]
            size += self._consume(run, taken)
            count += len(taken)
            end_seq = run.first_seq + int(taken[-1]) + 1
            if size >= excess:
                break
        self._seek(end_seq)
        return Removed(count, size, end_seq)

    def expire(self, now_ms: int, ttl_ms: int, through_seq: int | None = None) -> Removed:
        """Remove the oldest live records while they are older than `ttl_ms`. A `ttl_ms` of 0 keeps all.

        With `through_seq`, keep every record above it.
        """
        oldest_ms = now_ms - ttl_ms
        if not ttl_ms or not self.live or oldest_ms <= 0 or self._first_ts() >= oldest_ms:
            return NOTHING
        count = size = end_seq = 0
        for run, places in self._live_windows():
            fresh = run.ts[places] >= np.uint64(oldest_ms)
            if through_seq is not None:
                fresh |= places > through_seq - run.first_seq
            taken = places[: int(fresh.argmax())] if fresh.any() else places
            size += self._consume(run, taken)
            count += len(taken)
            if len(taken):
                end_seq = run.first_seq + int(taken[-1]) + 1
            if len(taken) < len(places):
                break
        if not count:
            return NOTHING
        self._seek(end_seq)
        return Removed(count, size, end_seq)

    def delete_prefix(self, before_seq: int) -> Removed:
        """Remove every live record below `before_seq`, but none that is not yet written."""
        before_seq = min(before_seq, self.head_seq + 1)
        if before_seq <= self.earliest_seq:
            return NOTHING
        records, size = 0, 0
        for run in self._from(self.earliest_seq):
            if run.first_seq >= before_seq:
                break
            if run.end_seq <= before_seq:
                records, size = records + run.live, size + run.live_bytes
                self._empty(run)
                continue
            start = max(self.earliest_seq - run.first_seq, 0)
            places = np.flatnonzero(run.is_live(start, before_seq - run.first_seq)) + start
            records, size = records + len(places), size + self._consume(run, places)
        self._seek(before_seq)
        return Removed(records, size, before_seq) if records else NOTHING

    def _empty(self, run: Columns) -> None:
        self.live -= run.live
        self.live_bytes -= run.live_bytes
        run.live = run.live_bytes = 0

    def _first_ts(self) -> int:
        run = self._runs[self._run_at(self.earliest_seq)]
        return run.row(self.earliest_seq - run.first_seq)[2]

    def _pop(self, excess: int) -> Removed:
        removed, end_seq, seq = 0, 0, self.earliest_seq
        for _ in range(excess):
            run = self._runs[self._run_at(seq)]
            place = seq - run.first_seq
            _, length, _, _, overhead = run.row(place)
            size = length - overhead
            run.live -= 1
            run.live_bytes -= size
            self.live -= 1
            self.live_bytes -= size
            removed += size
            end_seq = seq + 1
            if self.live and place + 1 < run.count and not run.flag(place + 1) & DEAD:
                self.earliest_seq = seq = end_seq
            else:
                self._seek(end_seq)
                seq = self.earliest_seq
        return Removed(excess, removed, end_seq)

    def _live_windows(self) -> Iterator[tuple[Columns, Places]]:
        """Yield the live rows from the earliest on, up to `_WINDOW` at a time. No part is empty."""
        start = self.earliest_seq
        for run in self._from(start):
            at = max(start - run.first_seq, 0)
            # `live` shrinks while the caller consumes the rows.
            while at < run.count and run.live:
                places = np.flatnonzero(run.is_live(at, min(at + _WINDOW, run.count))) + at
                at += _WINDOW
                if len(places):
                    yield run, places

    def _consume(self, run: Columns, places: Places) -> int:
        size = int(_sizes(run, places).sum(dtype=np.uint64))
        run.live -= len(places)
        run.live_bytes -= size
        self.live -= len(places)
        self.live_bytes -= size
        return size

    def _run_at(self, seq: int) -> int:
        """Return the position of the run that covers `seq`, or of the last run before it."""
        return max(bisect_right(self._starts, seq) - 1, 0)

    def _from(self, seq: int) -> Iterator[Columns]:
        return islice(self._runs, self._run_at(seq), None)

    def _seek(self, seq: int) -> None:
        """Move `earliest_seq` to the first live record at or above `seq`."""
        if not self.live:
            self.earliest_seq = self.head_seq + 1
            return
        for run in self._from(seq):
            if run.live and seq < run.end_seq:
                place = _next_live(run, max(seq - run.first_seq, 0))
                if place is not None:
                    self.earliest_seq = run.first_seq + place
                    return
        raise AssertionError("the count of live records exceeds the live rows")

    # ---- deletion at any position --------------------------------------------------------------------

    def delete_one(self, seq: int) -> bool:
        """Delete one record. Return whether it was live."""
        found = self.locate(seq)
        if found is None:
            return False
        run, place = found
        _, length, _, _, overhead = run.row(place)
        run.mark(place, DELETED)
        run.live -= 1
        run.live_bytes -= length - overhead
        self.live -= 1
        self.live_bytes -= length - overhead
        self.picked += 1
        if seq == self.earliest_seq:
            self._seek(seq + 1)
        return True

    def delete_seqs(self, seqs: Iterable[int] | Seqs) -> Removed:
        """Delete those of the given records that are live, and ignore the others."""
        if isinstance(seqs, np.ndarray) and len(seqs) <= _FEW:
            return self._delete_few(seqs.tolist())
        wanted = np.unique(seqs if isinstance(seqs, np.ndarray) else np.array(list(seqs), np.uint64))
        count = size = end_seq = 0
        for run, places in self._live_among(wanted):
            run.mark(places, DELETED)
            size += self._consume(run, places)
            count += len(places)
            end_seq = run.first_seq + int(places[-1]) + 1
        self.picked += count
        if count:
            self._seek(self.earliest_seq)
        return Removed(count, size, end_seq)

    def _delete_few(self, seqs: Sequence[int]) -> Removed:
        size = self.live_bytes
        removed = [seq for seq in seqs if self.delete_one(seq)]
        return Removed(len(removed), size - self.live_bytes, max(removed, default=-1) + 1)

    def are_live(self, seqs: Seqs) -> npt.NDArray[np.bool_]:
        """Return which of these sequence numbers are live. They must be ascending and distinct."""
        alive = np.zeros(len(seqs), np.bool_)
        for run, places in self._live_among(seqs):
            alive[np.searchsorted(seqs, places.astype(np.uint64) + np.uint64(run.first_seq))] = True
        return alive

    def _live_among(self, seqs: Seqs) -> Iterator[tuple[Columns, Places]]:
        low = int(np.searchsorted(seqs, np.uint64(self.earliest_seq)))
        while low < len(seqs):
            run = self._runs[self._run_at(int(seqs[low]))] if self._runs else None
            if run is None or not run.first_seq <= int(seqs[low]) < run.end_seq:
                following = self.run_from(int(seqs[low]))
                if following is None:
                    return
                run = following[0]
                low = int(np.searchsorted(seqs, np.uint64(run.first_seq)))
            high = int(np.searchsorted(seqs, np.uint64(run.end_seq)))
            places = (seqs[low:high] - np.uint64(run.first_seq)).astype(np.int64)
            places = places[(run.flags[places] & DEAD) == 0]
            if len(places):
                yield run, places
            low = high

    # ---- lookup --------------------------------------------------------------------------------------

    def locate(self, seq: int) -> tuple[Columns, int] | None:
        """Return the run and row of a live record, or None if the record is not live."""
        if not self.earliest_seq <= seq <= self.head_seq or not self._runs:
            return None
        run = self._runs[self._run_at(seq)]
        place = seq - run.first_seq
        if not 0 <= place < run.count or run.flag(place) & DEAD:
            return None
        return run, place

    def run_from(self, seq: int) -> tuple[Columns, int] | None:
        """Return the first row at or above `seq`, live or not, or None if there is none."""
        for run in self._from(seq):
            if seq < run.end_seq:
                return run, max(seq - run.first_seq, 0)
        return None

    def files(self) -> set[int]:
        """Return the log files and memory chunks that hold live records."""
        needed: set[int] = set()
        for run in self._runs:
            if run.live and not run.segment:
                needed.update(run.files(from_place=max(self.earliest_seq - run.first_seq, 0)))
        return needed - {NO_FILE}

    # ---- moving rows ---------------------------------------------------------------------------------

    @property
    def first_log_seq(self) -> int:
        """Return the first sequence number that is not in a segment, or `head_seq + 1` if there is none."""
        return next((run.first_seq for run in self._runs if not run.segment), self.head_seq + 1)

    def stretches(self, first_seq: int, last_seq: int) -> list[tuple[int, int]]:
        """Split the range at long holes. Return the first and last number of each part.

        A hole is long if it has more than `HOLE_ROWS_MAX` numbers. A segment can grow past shorter holes.
        """
        found: list[tuple[int, int]] = []
        for run in self._from(first_seq):
            low, high = max(run.first_seq, first_seq), min(run.end_seq - 1, last_seq)
            if low > high:
                continue
            start, end = found[-1] if found else (first_seq, first_seq - 1)
            if low - end - 1 <= HOLE_ROWS_MAX:
                found[-1:] = [(start, high)]
            else:
                found.append((low, high))
        if found and last_seq - found[-1][1] <= HOLE_ROWS_MAX:
            found[-1] = found[-1][0], last_seq
        return found

    def copy(self, first_seq: int, last_seq: int) -> Columns:
        """Copy the log rows of a range for a checkpoint, and flag rows that are not live as deleted."""
        copied = Columns(first_seq)
        ts_ms = 0
        while copied.end_seq <= last_seq:
            found = self.run_from(copied.end_seq)
            upto = last_seq + 1 if found is None else min(found[0].first_seq, last_seq + 1)
            if upto > copied.end_seq:
                copied.append_rows(NO_FILE, 0, pack_row(0, 0, ts_ms, HOLE, 0) * (upto - copied.end_seq))
            elif found is not None:
                run, place = found
                stop = min(run.end_seq, last_seq + 1) - run.first_seq
                copied.append_part(run, place, stop)
                ts_ms = int(run.ts[stop - 1])
        gone = min(max(self.earliest_seq - first_seq, 0), copied.count)
        copied.mark(np.arange(gone), DELETED)
        copied.recount()
        return copied

    def promote(self, run: Columns) -> None:
        """Replace the rows that a segment was made from with the segment. Later deletions are kept."""
        start, stop = run.first_seq, run.end_seq
        assert stop <= self.head_seq + 1, "a segment holds only written records"
        alive = self._liveness(start, stop)
        dead = ~alive & run.is_live(0, run.count)
        dead[: min(max(self.earliest_seq - start, 0), run.count)] = False
        assert not np.any(alive & ~run.is_live(0, run.count)), "a live record is missing in the segment"
        run.mark(np.flatnonzero(dead), DELETED)
        run.recount(self.earliest_seq)
        self._runs = [*self._parts_outside(start, stop), run]
        self._runs.sort(key=_first_seq)
        self._starts = [kept.first_seq for kept in self._runs]
        assert sum(kept.live for kept in self._runs) == self.live
        self.live_bytes = sum(kept.live_bytes for kept in self._runs)

    def _liveness(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        alive = np.zeros(stop - start, np.bool_)
        for run in self._runs:
            low, high = max(start, run.first_seq, self.earliest_seq), min(stop, run.end_seq)
            if low < high:
                alive[low - start : high - start] = run.is_live(low - run.first_seq, high - run.first_seq)
        return alive

    def _parts_outside(self, start: int, stop: int) -> Iterator[Columns]:
        for run in self._runs:
            if run.end_seq <= start or run.first_seq >= stop:
                yield run
                continue
            assert not run.segment or start <= run.first_seq <= run.end_seq <= stop, (
                "segments are never split"
            )
            for first, end in (
                (run.first_seq, min(run.end_seq, start)),
                (max(run.first_seq, stop), run.end_seq),
            ):
                if first < end:
                    part = run.part(first, end - 1)
                    part.recount(self.earliest_seq)
                    yield part

    def drop_dead_runs(self) -> list[Columns]:
        """Drop every run without a live record. Return the dropped runs."""
        dropped = [run for run in self._runs if not run.live]
        if dropped:
            self._runs = [run for run in self._runs if run.live]
            self._starts = [run.first_seq for run in self._runs]
        return dropped


def _first_seq(run: Columns) -> int:
    return run.first_seq


def _sizes(run: Columns, places: Places) -> npt.NDArray[np.uint32]:
    if not len(places):
        return np.zeros(0, np.uint32)
    first = int(places[0])
    return run.accounted(first, int(places[-1]) + 1)[places - first]


def _next_live(run: Columns, place: int) -> int | None:
    for near in range(place, min(place + _FEW, run.count)):
        if not run.flag(near) & DEAD:
            return near
    window = 64
    place += _FEW
    while place < run.count:
        alive = run.is_live(place, min(place + window, run.count))
        if alive.any():
            return place + int(alive.argmax())
        place += window
        window = min(2 * window, _WINDOW)
    return None
