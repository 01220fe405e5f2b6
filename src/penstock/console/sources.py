"""The sources of the console: every place of a fleet, each with its own poller."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, ParamSpec, Protocol, TypeVar

from penstock.clock import Clock
from penstock.console.http_poller import Exposition, HttpSource
from penstock.console.poller import Meter, Pollable, Poller, Trail
from penstock.console.queues import QueueReading, QueueSource
from penstock.console.topics_source import TopicsNumbers, TopicsReading, TopicsSource
from penstock.console.topology import url_of
from penstock.errors import NotFound
from penstock.objects import Workers
from penstock.quiver import LocalSegments, SegmentInfo, SubscriberLook, core_directories, look_at_progress
from penstock.storage import OsFileSystem
from penstock.up import (
    CollectorPlace,
    DatabasePlace,
    FleetMap,
    FleetView,
    PartStatus,
    PipelinePlace,
    QueuePlace,
    QuiverPlace,
    pipeline_environment,
)

if TYPE_CHECKING:
    from penstock.spark import AuditReport, BooksReading

LINES_SHOWN: Final = 200
COUNTERS: Final = ("collector_receiver_bytes", "feed_records")
"""The counters in `/metrics` whose rates are computed."""
_HISTORY: Final = 1080
"""Points of the history: three hours, with one point every ten seconds."""
_EPOCHS_KEPT: Final = 50
_SLOWEST_S: Final = 10.0
"""The longest interval between polls of a topics server with many topics, and the window of its rates."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="_Source")
N = TypeVar("N", bound="_Named")
_FILES_MAX: Final = 200_000
_READERS: Final = threading.local()
"""The per-thread state of the directory that a thread reads. Each source has its own thread, so the state
belongs to one source and ends with it."""


class _Source(Protocol):
    async def close(self) -> None: ...


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class QueueWatch:
    """A queue with its poller, its rates, and its history."""

    def __init__(self, place: QueuePlace, clock: Clock) -> None:
        self.place = place
        self.source = QueueSource(place, clock)
        self._clock = clock
        self.main: Poller[QueueReading] = Poller(self._look, clock, interval_s=1.0, timeout_s=5.0)
        self.batches, self.records, self.bytes = Meter(), Meter(), Meter()
        self.relays: dict[str, Meter] = {}
        """The rate of each application of interest."""
        self.history = Trail(_HISTORY)
        self.epochs: list[tuple[int, int]] = []
        """(epoch, time when it was first seen), newest last."""

    async def _look(self) -> QueueReading:
        now = self._clock.monotonic()
        try:
            reading = await self.source.look()
        except BaseException:
            for meter in (self.batches, self.records, self.bytes, *self.relays.values()):
                meter.read(now, None)
            raise
        self.batches.read(now, reading.following)
        self.records.read(now, reading.seen_records)
        self.bytes.read(now, reading.seen_bytes)
        for app, position in reading.positions.items():
            self.relays.setdefault(app, Meter()).read(now, position)
        if reading.exists and (not self.epochs or self.epochs[-1][0] != reading.epoch):
            self.epochs.append((reading.epoch, self._clock.now_ms()))
            del self.epochs[:-_EPOCHS_KEPT]
        return reading

    def note(self) -> None:
        """Add a point to the history, unless the queue cannot be read."""
        reading = self.main.reading.value
        if reading is not None:
            self.history.add(self._clock.now_ms(), reading.depth, reading.manifest_bytes)

    async def close(self) -> None:
        await self.main.close()
        await self.source.close()


class TopicsWatch:
    """The topics server with its pollers and its rates."""

    def __init__(self, clock: Clock) -> None:
        self.source = TopicsSource(clock)
        self._clock = clock
        self.main: Poller[TopicsReading] = Poller(self.source.look, clock, interval_s=2.0, timeout_s=3.0)
        self.numbers: Poller[TopicsNumbers] = Poller(
            self._look, clock, interval_s=2.0, timeout_s=3.0, interval_max_s=_SLOWEST_S
        )
        self.frames, self.bytes = Meter(), Meter()

    async def _look(self) -> TopicsNumbers:
        now = self._clock.monotonic()
        try:
            numbers = await self.source.numbers()
        except BaseException:
            for meter in (self.frames, self.bytes):
                meter.read(now, None)
            raise
        self.frames.read(now, numbers.frames)
        self.bytes.read(now, numbers.bytes_written)
        return numbers

    async def close(self) -> None:
        await self.main.close()
        await self.numbers.close()
        await self.source.close()


class MetricsSource:
    """A part that serves `/metrics`: the collector or a database."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.http = HttpSource(name)
        self._clock = clock
        self.main: Poller[Exposition] = Poller(self._look, clock, interval_s=2.0, timeout_s=3.0)
        self._meters = {name: Meter() for name in COUNTERS}

    async def _look(self) -> Exposition:
        now = self._clock.monotonic()
        try:
            reading = await self.http.look()
        except BaseException:
            for meter in self._meters.values():
                meter.read(now, None)
            raise
        for name, meter in self._meters.items():
            meter.read(now, reading.total(name))
        return reading

    def rate(self, name: str) -> float | None:
        """Return the rate of one of `COUNTERS`."""
        return self._meters[name].rate

    async def close(self) -> None:
        await self.main.close()
        await self.http.close()


class QuiverSource:
    """A data directory of Quiver."""

    def __init__(self, place: QuiverPlace, clock: Clock) -> None:
        self.place = place
        self._reader = Workers(f"quiver-{place.name}", 1)
        self.main: Poller[QuiverReading] = Poller(
            lambda: self._reader.run(read_quiver, place), clock, interval_s=3.0, timeout_s=10.0
        )

    async def close(self) -> None:
        await self.main.close()
        self._reader.close()


class PipelineSource:
    """A pipeline's ledger and tables. Each kind of query has its own thread."""

    def __init__(self, place: PipelinePlace, clock: Clock, environment: Mapping[str, str]) -> None:
        from penstock.spark import PipelineBooks

        self.place = place
        self.books = PipelineBooks(Path(place.file), environment)
        self._reader = Workers(f"books-{place.name}", 1)
        self._auditor = Workers(f"audit-{place.name}", 1)
        books = self.books
        self.main: Poller[BooksReading] = Poller(
            lambda: self._reader.run(books.read, LINES_SHOWN), clock, interval_s=2.0, timeout_s=10.0
        )
        self.balance: Poller[AuditReport] = Poller(
            lambda: self._auditor.run(books.audit), clock, interval_s=30.0, timeout_s=120.0
        )

    async def ask(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query in its thread."""
        return await self._reader.run(call, *args, **kwargs)

    async def close(self) -> None:
        await self.main.close()
        await self.balance.close()
        self._reader.close()
        self._auditor.close()
        self.books.close()


class Sources:
    """The sources of all places of the fleet."""

    def __init__(self, fleet: FleetView, clock: Clock) -> None:
        self.fleet = fleet
        self.clock = clock
        self.environment = pipeline_environment(fleet.map.data_dir)
        """The environment of pipelines' files and of commands."""
        self.places = FleetMap(data_dir=fleet.map.data_dir)
        self.collector_place: CollectorPlace | None = None
        self.topics = TopicsWatch(clock)
        self.queues: dict[str, QueueWatch] = {}
        self.quivers: dict[str, QuiverSource] = {}
        self.pipelines: dict[str, PipelineSource] = {}
        self.databases: dict[str, MetricsSource] = {}
        self.collector = MetricsSource("the collector", clock)
        self._removed: list[_Source] = []

    def refresh(self) -> FleetMap:
        """Follow changes of the fleet: add and remove sources, and update addresses."""
        places = self.places = self.fleet.map
        parts = {part.name: part for part in self.fleet.parts()}
        self.collector_place = places.collector(parts.values())
        self._follow(self.queues, places.queues, lambda place: QueueWatch(place, self.clock))
        self._follow(self.quivers, places.quivers, lambda place: QuiverSource(place, self.clock))
        self._follow(
            self.pipelines,
            places.pipelines,
            lambda place: PipelineSource(place, self.clock, self.environment),
        )
        self._follow(self.databases, places.databases, lambda place: MetricsSource(place.name, self.clock))
        for place in places.databases:
            key = place.key.reveal() if place.key else None
            self.databases[place.name].http.move(url_of(parts.get(place.part)), key)
        collector = self.collector_place
        self.collector.http.move(None if collector is None else url_of(parts.get(collector.part)), None)
        topics = places.topics
        self.topics.source.move(
            None if topics is None else url_of(parts.get(topics.part)),
            topics.key.reveal() if topics is not None and topics.key else None,
        )
        for name, watch in self.queues.items():
            watch.source.apps = frozenset(relay.app for relay in places.relays if relay.queue == name)
        self.topics.source.relayed = {
            relay.topic: self._position(relay.queue, relay.app) for relay in places.relays
        }
        return places

    def part(self, name: str) -> PartStatus | None:
        """Return the current status of a part."""
        return next((part for part in self.fleet.parts() if part.name == name), None)

    def _follow(self, known: dict[str, S], places: Iterable[N], make: Callable[[N], S]) -> None:
        current = {place.name: place for place in places}
        for name in [name for name in known if name not in current]:
            self._removed.append(known.pop(name))
        for name, place in current.items():
            if name not in known:
                known[name] = make(place)

    def _position(self, queue: str, app: str) -> int | None:
        watch = self.queues.get(queue)
        reading = None if watch is None else watch.main.reading.value
        return None if reading is None else reading.positions.get(app)

    def pollers(self) -> Iterator[Pollable]:
        """Yield the pollers of the nodes and edges of the data flow."""
        if self.places.topics is not None:
            yield self.topics.numbers
        if self.places.topics is not None and self.places.relays:
            yield self.topics.main
        if self.collector_place is not None:
            yield self.collector.main
        for queue in self.queues.values():
            yield queue.main
        for quiver in self.quivers.values():
            yield quiver.main
        for database in self.databases.values():
            yield database.main
        for pipeline in self.pipelines.values():
            yield pipeline.main
            yield pipeline.balance

    def queue(self, name: str) -> QueueWatch:
        """Return a source by name. This and the methods below raise `NotFound` for an unknown name."""
        return _found(self.queues, name, "queue")

    def quiver(self, name: str) -> QuiverSource:
        return _found(self.quivers, name, "Quiver directory")

    def pipeline(self, name: str) -> PipelineSource:
        return _found(self.pipelines, name, "pipeline")

    def database(self, name: str) -> tuple[DatabasePlace, MetricsSource]:
        source = _found(self.databases, name, "database")
        return next(place for place in self.places.databases if place.name == name), source

    async def close(self) -> None:
        sources: list[_Source] = [*self._removed, self.topics, self.collector]
        sources += [*self.queues.values(), *self.quivers.values()]
        sources += [*self.pipelines.values(), *self.databases.values()]
        for source in sources:
            await source.close()


class Attention:
    """Keeps all sources polled, including later ones, until it ends."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._watched: dict[Pollable, AbstractContextManager[None]] = {}

    def follow(self) -> None:
        """Poll the current sources and stop polling removed ones."""
        current = set(self._sources.pollers())
        for poller in [poller for poller in self._watched if poller not in current]:
            self._watched.pop(poller).__exit__(None, None, None)
        for poller in current:
            if poller not in self._watched:
                context = self._watched[poller] = poller.watched()
                context.__enter__()

    def end(self) -> None:
        for context in self._watched.values():
            context.__exit__(None, None, None)
        self._watched.clear()


def _found(known: Mapping[str, T], name: str, what: str) -> T:
    if name not in known:
        raise NotFound(f"there is no {what} {name[:80]!r} in the plan")
    return known[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverReading:
    """The synced state of a directory, which lags behind its writer."""

    segments: tuple[SegmentInfo, ...]
    damaged: tuple[str, ...]
    subscribers: tuple[tuple[int, SubscriberLook], ...]
    """(core, subscriber)."""
    disk_bytes: int
    free_bytes: int

    @property
    def items(self) -> int:
        return sum(info.item_count for info in self.segments)


def read_quiver(place: QuiverPlace) -> QuiverReading:
    """Read a directory (blocking). Raise `NotFound` if it does not exist, and errors for damaged files.

    Each thread reads the metadata of a segment only once.
    """
    root = os.path.abspath(place.path)
    if not os.path.isdir(root):
        raise NotFound(f"there is no directory {place.path} yet")
    fs = OsFileSystem()
    source = _segments_of(root)
    infos = source.infos()
    subscribers = [
        (core, look)
        for core, directory in core_directories(fs, root)
        for look in look_at_progress(fs, directory, [info for info in infos if info.core_id == core])
    ]
    return QuiverReading(
        segments=tuple(infos),
        damaged=tuple(sorted(source.damaged)),
        subscribers=tuple(subscribers),
        disk_bytes=_disk_bytes(root),
        free_bytes=shutil.disk_usage(root).free,
    )


def _segments_of(root: str) -> LocalSegments:
    """Return the segments below a directory. A known source reads only new metadata files."""
    known: dict[str, LocalSegments] = _READERS.__dict__.setdefault("segments", {})
    if root not in known:
        known[root] = LocalSegments(root)
    return known[root]


def _disk_bytes(root: str) -> int:
    """Return the disk space of the files. A file that is removed during the call counts as zero."""
    total = seen = 0
    for folder, _, names in os.walk(root):
        for name in names:
            seen += 1
            if seen > _FILES_MAX:
                return total
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total
