"""Pages of a topic: the rows from a reader's cursor to the head, in whichever tier the records are.

A page is built in steps, because some bytes may have to be fetched. Each step takes the next rows of one run.
If their bytes are available, it renders them; otherwise it returns the byte range that it needs, and
continues after `supply`. Only the cursor and the requested rows are kept between steps, so records that are
deleted or evicted meanwhile are not in the page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.clock import Clock
from penstock.storage import FileView
from penstock.topics.errors import Damaged, TopicNotFound
from penstock.topics.limits import (
    BATCH_BYTES_DEFAULT,
    BATCH_BYTES_MAX,
    DIFF_LIMIT_DEFAULT,
    DIFF_LIMIT_MAX,
    WAIT_MS_MAX,
)
from penstock.topics.log.frame import HEADER_BYTES
from penstock.topics.model import Page, Predicate, Tombstone
from penstock.topics.read.render import (
    Frames,
    Style,
    Unreadable,
    foreign,
    is_log_frame,
    is_meant,
    node_of,
    render,
    render_one,
    tag_of,
    tagged,
    unreadable,
)
from penstock.topics.segments.columns import DAMAGED, DEAD, NO_FILE, Columns, Places, StoredBytes, span
from penstock.topics.segments.format import HAS_NODE, HAS_TAG
from penstock.topics.segments.reader import Segment
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.index import TopicIndex
from penstock.topics.topic.topic import Topic
from penstock.topics.topic.watermarks import LostRanges, LowWatermarks, tombstone_for
from penstock.topics.workers import Workers

ROWS_PER_STEP: Final = 4096
_NOTHING: Final = memoryview(b"")
_FEW: Final = 8
"""The number of rows up to which a plain loop is faster than arrays."""
_NEAR_BYTES: Final = 64 * 1024
RANGE_BYTES_MAX: Final = 4 * 1024**2
"""The most bytes that one step fetches, unless a single record is larger."""

Views: TypeAlias = Callable[[Columns, int], StoredBytes | None]
"""Return the bytes of a run's file, by its number, or None if they must be fetched."""


class DiffRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A read request, within the limits of the contract."""

    from_seq: int = 0
    limit: int = DIFF_LIMIT_DEFAULT
    max_batch_bytes: int = BATCH_BYTES_DEFAULT
    nodes: frozenset[bytes] = frozenset()
    """The origins whose records are skipped. Empty if the topic does not filter by origin."""
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    match: Predicate | None = None
    """The tag filter of the request."""
    until_seq: int = 0
    """The last sequence number that the page may cover; 0 for no limit."""

    @classmethod
    def of(
        cls,
        from_seq: int = 0,
        *,
        limit: int = 0,
        max_batch_bytes: int = 0,
        nodes: Iterable[str] = (),
        include_tags: bool = False,
        include_meta: bool = True,
        include_data: bool = True,
        match: Predicate | None = None,
        until_seq: int = 0,
        dedupe_node: bool = True,
    ) -> DiffRequest:
        """Return the request with defaults for zeros, and values limited to their maximum."""
        return cls(
            from_seq=from_seq,
            limit=min(limit or DIFF_LIMIT_DEFAULT, DIFF_LIMIT_MAX),
            max_batch_bytes=min(max_batch_bytes or BATCH_BYTES_DEFAULT, BATCH_BYTES_MAX),
            nodes=frozenset(node.encode("utf-8", "surrogatepass") for node in nodes)
            if dedupe_node
            else frozenset(),
            include_tags=include_tags,
            include_meta=include_meta,
            include_data=include_data,
            match=match,
            until_seq=until_seq,
        )

    @property
    def filters(self) -> bool:
        """Return whether live records may be skipped."""
        return bool(self.nodes) or self.match is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByteRange:
    """Bytes `start` to `stop - 1` of a file that a run points into."""

    run: Columns
    file: int
    start: int
    stop: int
    places: Places
    """The rows whose frames are in the range."""
    next_seq: int
    """The cursor after these rows."""


class PageCursor:
    """A page that is being built. Call `step` until `done`, then `page`.

    When a step returns a range, fetch it and pass it to `supply` before the next step.
    """

    __slots__ = (
        "_budget",
        "_floors",
        "_fragments",
        "_index",
        "_needed",
        "_oldest_ms",
        "_request",
        "_scanned",
        "_seen",
        "_style",
        "_trims",
        "cold_reads",
        "done",
        "next_seq",
        "tombstone",
    )

    def __init__(
        self,
        index: TopicIndex,
        floors: LowWatermarks,
        request: DiffRequest,
        *,
        now_ms: int,
        ttl_ms: int,
        trims: LostRanges | None = None,
    ) -> None:
        self._index = index
        self._floors = floors
        self._request = request
        self._style = Style(
            include_tags=request.include_tags,
            include_meta=request.include_meta,
            include_data=request.include_data,
        )
        self._oldest_ms = max(now_ms - ttl_ms, 0) if ttl_ms else 0
        self._budget = request.max_batch_bytes
        self._fragments: list[bytes] = []
        self._scanned = 0
        self._needed: ByteRange | None = None
        self.cold_reads = 0
        self.done = False
        self.tombstone = tombstone_for(floors, request.from_seq, index.earliest_seq, index.head_seq)
        position = request.from_seq if request.from_seq <= index.head_seq else 0
        self.next_seq = max(position + 1, index.earliest_seq)
        """The first sequence number that is not examined yet."""
        self._trims = trims
        self._seen = position if self.tombstone is None else max(position, self.tombstone.earliest_seq - 1)
        """The last record that the reader has been informed about. `next_seq` may be past deleted records."""

    def step(self, views: Views) -> ByteRange | None:
        """Examine the next rows. Raise `Damaged` if the first record of the page cannot be read."""
        assert self._needed is None, "the requested range has not been supplied"
        if self._is_overtaken():
            return None
        self.next_seq = max(self.next_seq, self._index.earliest_seq)
        bound = self._last_seq() + 1
        if self._trims:
            bound = self._report_lost_ranges(self._trims, bound)
            if self.done:
                return None
        found = self._index.run_from(self.next_seq)
        if found is None or found[0].first_seq + found[1] >= bound:
            self._examined(bound)
            return None
        run, start = found
        file, stop = run.file_of(start)
        stop = min(stop, bound - run.first_seq)
        view: StoredBytes | None = _NOTHING if file == NO_FILE else views(run, file)
        if view is not None and not run.segment and self._is_short(run, start, stop):
            self._take_few(run, start, min(stop, start + _FEW), view)
            return None
        stop = min(stop, start + self._window())
        places = start + np.flatnonzero(self._wanted(run, start, stop))
        wanted = ByteRange(run=run, file=file, start=0, stop=0, places=places, next_seq=run.first_seq + stop)
        if not len(places):
            self._examined(wanted.next_seq)
            return None
        if view is None:
            return self._range_to_fetch(wanted)
        if isinstance(view, FileView) and self._request.filters:
            self._take_filtered(wanted, view)
        else:
            self._take(wanted, Frames(run, view, 0))
        return None

    def _take_filtered(self, wanted: ByteRange, view: FileView) -> None:
        """Take rows that are filtered by the content of their frames, after reading the first frames."""
        near, self._needed = self._range_to_fetch(wanted), None
        if near is not None:
            data = memoryview(view.read(near.start, near.stop))
            self._take(near, Frames(near.run, data, near.start, file=view))

    def supply(self, data: memoryview) -> None:
        """Supply the bytes that the last step requested."""
        needed, self._needed = self._needed, None
        assert needed is not None, "no range was requested"
        self.cold_reads += 1
        if self._is_overtaken():
            return
        seqs = needed.places.astype(np.uint64) + np.uint64(needed.run.first_seq)
        still = needed.places[self._index.are_live(seqs)]
        self._take(replace(needed, places=still), Frames(needed.run, data, needed.start))

    def _is_overtaken(self) -> bool:
        """Return whether the page must end because records after the cursor were lost while it was built.

        A page with records ends before the loss, and the next page reports it. An empty page reports it
        itself.
        """
        if self._floors.floor <= self.next_seq:
            return False
        if self._fragments:
            self.done = True
            return True
        index, tombstone = self._index, self.tombstone
        if tombstone is None or tombstone.reason != "recreated":
            seen = self.next_seq - 1 if tombstone is None else self._request.from_seq
            self.tombstone = tombstone_for(self._floors, seen, index.earliest_seq, index.head_seq)
        return False

    def _report_lost_ranges(self, trims: LostRanges, end_seq: int) -> int:
        """Report records that the source of a copy lost, if the cursor is there.

        Return where this page must stop.
        """
        trim = trims.after(self._seen)
        if trim is None or trim[0] > self.next_seq:
            return end_seq if trim is None else min(trim[0], end_seq)
        first, end = max(trim[0], self._seen + 1), min(trim[1], end_seq)
        if first >= end:
            return end_seq
        if self._fragments or self.tombstone is not None:
            # A page reports one gap. The next page starts with this one.
            self.next_seq = first
            self.done = True
            return first
        self.tombstone = Tombstone(
            gap_from=first,
            gap_to=end - 1,
            reason="lost" if self._floors.is_lost(first, end) else "source_trim",
            missed_estimate=end - first,
            earliest_seq=end,
            head_seq=self._index.head_seq,
        )
        self._examined(end)
        return self._report_lost_ranges(trims, end_seq)

    def page(self, topic: str) -> Page:
        """Return the finished page."""
        assert self.done
        return Page(
            topic=topic,
            fragments=self._fragments,
            next_from_seq=min(self.next_seq - 1, self._last_seq()),
            head_seq=self._index.head_seq,
            earliest_seq=self._index.earliest_seq,
            tombstone=self._bounded_tombstone(),
            records_scanned=self._scanned,
            cold_segments_read=self.cold_reads,
        )

    def _last_seq(self) -> int:
        """Return the last sequence number that this page may cover."""
        head_seq, until_seq = self._index.head_seq, self._request.until_seq
        return min(head_seq, until_seq) if until_seq else head_seq

    def _bounded_tombstone(self) -> Tombstone | None:
        """Return the tombstone, cut at the end of this page. The next page reports the rest."""
        gap, until_seq = self.tombstone, self._request.until_seq
        if gap is None or not until_seq or gap.reason == "recreated" or gap.gap_to <= until_seq:
            return gap
        missed = until_seq - gap.gap_from + 1
        return replace(gap, gap_to=until_seq, missed_estimate=missed) if missed > 0 else None

    def _take_few(self, run: Columns, start: int, stop: int, view: StoredBytes) -> None:
        """Take a few rows without arrays. A reader at the head does this after every write."""
        base, near = _near(run, start, stop, view)
        for place in range(start, stop):
            offset, length, ts, flags, overhead = run.row(place)
            seq = run.first_seq + place
            if flags & DEAD or ts < self._oldest_ms:
                continue
            if flags & DAMAGED or length < HEADER_BYTES or offset + length > len(view):
                self._stop_at(unreadable(seq))
                return
            frame = span(near, offset - base, offset - base + length)
            if isinstance(view, FileView) and not is_log_frame(frame, seq):
                self._stop_at(unreadable(seq))
                return
            if flags & HAS_NODE and self._request.nodes and node_of(frame) in self._request.nodes:
                continue
            match = self._request.match
            if match is not None and not (flags & HAS_TAG and is_meant(match, tag_of(frame))):
                continue
            if self._fragments and length - overhead > self._budget:
                self._finish(seq)
                return
            self._budget -= length - overhead
            self._fragments.append(render_one(frame, seq, ts, flags, self._style))
            if len(self._fragments) == self._request.limit:
                self._finish(seq + 1)
                return
        self._examined(run.first_seq + stop)

    def _is_short(self, run: Columns, start: int, stop: int) -> bool:
        """Return whether there are only a few rows, or only a few live ones are requested."""
        if stop - start <= _FEW:
            return True
        return self._request.limit - len(self._fragments) <= _FEW and not run.flag(start) & DEAD

    def _stop_at(self, bad: Unreadable) -> None:
        if not self._fragments:
            raise bad.error
        self._finish(bad.seq)

    def _window(self) -> int:
        """Return how many rows to examine: about as many as fit, or more if a filter may skip many."""
        return ROWS_PER_STEP if self._request.filters else self._request.limit - len(self._fragments) + 16

    def _wanted(self, run: Columns, start: int, stop: int) -> npt.NDArray[np.bool_]:
        alive = run.is_live(start, stop)
        if self._oldest_ms:
            alive &= run.ts[start:stop] >= np.uint64(self._oldest_ms)
        return alive

    def _range_to_fetch(self, wanted: ByteRange) -> ByteRange | None:
        """Return the range to fetch for these rows, or None if the first of them cannot be read."""
        lost = (wanted.run.flags[wanted.places] & np.uint8(DAMAGED)) != 0
        readable = int(lost.argmax()) if lost.any() else len(lost)
        if not readable:
            self._stop_at(unreadable(wanted.run.first_seq + int(wanted.places[0])))
            return None
        if readable < len(lost):
            next_seq = wanted.run.first_seq + int(wanted.places[readable])
            wanted = replace(wanted, places=wanted.places[:readable], next_seq=next_seq)
        self._needed = self._bounded(wanted)
        return self._needed

    def _bounded(self, wanted: ByteRange) -> ByteRange:
        """Limit the rows to what the page can take, and the bytes to what one fetch may read."""
        run, places = wanted.run, wanted.places
        if not self._request.filters:
            sizes = np.cumsum(run.accounted(0, run.count)[places], dtype=np.int64)
            fit_count = int(np.searchsorted(sizes, self._budget, side="right"))
            places = places[: min(self._request.limit - len(self._fragments), max(fit_count, 1))]
        starts = run.offset[places].astype(np.int64)
        ends = starts + run.length[places]
        near = int(np.searchsorted(ends, int(starts[0]) + RANGE_BYTES_MAX, side="right"))
        places = places[: max(near, 1)]
        cut = len(places) < len(wanted.places)
        return replace(
            wanted,
            start=int(starts[0]),
            stop=int(ends[len(places) - 1]),
            places=places,
            next_seq=run.first_seq + int(places[-1]) + 1 if cut else wanted.next_seq,
        )

    def _take(self, wanted: ByteRange, frames: Frames) -> None:
        run, places = wanted.run, wanted.places
        next_seq = wanted.next_seq
        if self._request.nodes:
            places = self._not_own(run, places, frames)
        if self._request.match is not None:
            tagged_places = places[(run.flags[places] & np.uint8(HAS_TAG)) != 0]
            places = tagged_places[tagged(frames, tagged_places, self._request.match)]
        room = self._request.limit - len(self._fragments)
        sizes = np.cumsum(frames.accounted(places), dtype=np.int64)
        fit_count = int(np.searchsorted(sizes, self._budget, side="right"))
        if not self._fragments:
            fit_count = max(fit_count, 1)
        full = False
        if min(fit_count, room) < len(places):
            full = True
            # A page that reaches the record limit ends at the last delivered record. A page that reaches the
            # byte limit examines everything up to the record that does not fit.
            last = int(places[fit_count]) - 1 if fit_count < room else int(places[room - 1])
            next_seq = run.first_seq + last + 1
            places = places[: min(fit_count, room)]
        if len(places):
            bad = render(frames, places, self._style, self._fragments)
            self._budget -= int(sizes[len(places) - 1])
            if bad is not None:
                self._stop_at(bad)
                return
        full = full or len(self._fragments) >= self._request.limit
        if len(self._fragments) >= self._request.limit and len(places):
            next_seq = run.first_seq + int(places[-1]) + 1
        self._examined(next_seq)
        if full:
            self.done = True

    def _not_own(self, run: Columns, places: Places, frames: Frames) -> Places:
        has_node = (run.flags[places] & np.uint8(HAS_NODE)) != 0
        if not has_node.any():
            return places
        keep = np.ones(len(places), np.bool_)
        keep[has_node] = foreign(frames, places[has_node], self._request.nodes)
        return places[keep]

    def _examined(self, next_seq: int) -> None:
        self._scanned += max(next_seq - self.next_seq, 0)
        self.next_seq = max(self.next_seq, next_seq)
        self._seen = max(self._seen, next_seq - 1)
        if self.next_seq > self._last_seq():
            self.done = True

    def _finish(self, next_seq: int) -> None:
        self._examined(next_seq)
        self.done = True


def _near(run: Columns, start: int, stop: int, view: StoredBytes) -> tuple[int, StoredBytes]:
    """Read a few rows with one read if they are close together.

    Return the bytes and their offset in the file.
    """
    if isinstance(view, FileView) and stop - start > 1:
        first, (last, length, *_) = run.row(start)[0], run.row(stop - 1)
        if 0 < last + length - first <= _NEAR_BYTES:
            return first, memoryview(view.read(first, last + length))
    return 0, view


def collect(
    topic: str,
    index: TopicIndex,
    floors: LowWatermarks,
    views: Views,
    request: DiffRequest,
    *,
    now_ms: int,
    ttl_ms: int,
) -> Page:
    """Return a whole page from runs whose bytes are all available."""
    walk = PageCursor(index, floors, request, now_ms=now_ms, ttl_ms=ttl_ms)
    while not walk.done:
        needed = walk.step(views)
        assert needed is None, "these bytes must be fetched: use a PageCursor"
    return walk.page(topic)


class Reader:
    """The reader for the topics of a catalog. `check` raises while the engine serves no calls."""

    def __init__(self, catalog: Catalog, clock: Clock, workers: Workers, check: Callable[[], None]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._workers = workers
        self._check = check

    async def read(self, topic: Topic, request: DiffRequest, *, wait_ms: int) -> Page:
        """Read a page. See `Engine.diff`."""
        if not wait_ms:
            return await self._page(topic, request)
        with topic.subscribers.register() as published:
            page = await self._page(topic, request)
            if page.fragments or page.tombstone is not None or not page.caught_up:
                return page
            if not await self._wait(published, min(wait_ms, WAIT_MS_MAX)):
                return page
        self._check()
        if topic.deleted:
            raise TopicNotFound(topic.name)
        return await self._page(topic, request)

    async def _wait(self, published: asyncio.Future[None], wait_ms: int) -> bool:
        """Return whether something was published before the timeout."""
        timer = asyncio.ensure_future(self._clock.sleep(wait_ms / 1000))
        try:
            await asyncio.wait([published, timer], return_when=asyncio.FIRST_COMPLETED)
            return published.done()
        finally:
            timer.cancel()

    def page_at_hand(self, topic: Topic, request: DiffRequest) -> Page | None:
        """Return a page without waiting, or None if some bytes must be fetched.

        Raise `Damaged` as `step` does.
        """
        walk = self._walk(topic, request)
        while not walk.done:
            if walk.step(topic.log.view) is not None:
                return None
        return walk.page(topic.name)

    def _walk(self, topic: Topic, request: DiffRequest) -> PageCursor:
        now_ms = self._clock.now_ms()
        topic.touch(now_ms)
        self._catalog.retain(topic)
        return PageCursor(
            topic.log.index,
            topic.log.floors,
            request,
            now_ms=topic.log.ages.now_ms(topic.log.steady_ms(now_ms)),
            ttl_ms=topic.config.ttl_ms,
            trims=topic.log.trims,
        )

    async def _page(self, topic: Topic, request: DiffRequest) -> Page:
        walk = self._walk(topic, request)
        while not walk.done:
            needed = walk.step(topic.log.view)
            if needed is not None:
                await self._supply(walk, topic, needed)
        return walk.page(topic.name)

    async def _supply(self, walk: PageCursor, topic: Topic, needed: ByteRange) -> None:
        """Supply the bytes of a cold segment. Raise `Unavailable` if its tier does not respond.

        If the bytes are gone, supply none, because the page may no longer need them. If it does, raise
        `Damaged` with the cause.
        """
        segment = topic.log.segment_of(needed.run)
        try:
            data = await self._workers.fetch(lambda: segment.read_bytes(needed.start, needed.stop))
        except Damaged as error:
            if topic.deleted:
                raise TopicNotFound(topic.name) from None
            self._supply_nothing(walk, topic, segment, error)
        else:
            walk.supply(data)

    def _supply_nothing(self, walk: PageCursor, topic: Topic, segment: Segment, cause: Damaged) -> None:
        try:
            walk.supply(memoryview(b""))
        except Damaged:
            first, last = segment.first_seq, segment.entry.end_seq - 1
            raise Damaged(
                f'records {first} to {last} of topic "{topic.name}" cannot be read: {cause}',
                {"topic": topic.name, "first_seq": first, "last_seq": last},
            ) from cause
