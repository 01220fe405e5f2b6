"""The console's API of queues."""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.buffer import QueueSurvey
from penstock.console.app import Call, json_answer, text_fields
from penstock.console.poller import Poller
from penstock.console.queues import EntryView, QueueReading
from penstock.console.sources import QueueWatch, Sources
from penstock.http import Response

ENTRIES_SHOWN: Final = 500
_METADATA_SHOWN: Final = 4
_METADATA_BYTES: Final = 256
_COUNTED_MAX: Final = 2000
_CONFLICTS: Final = "buffer_manifest_conflicts"


class BuffersPanel:
    """Handlers for the queues of the fleet."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._surveys: dict[str, Poller[list[QueueSurvey]]] = {}

    async def close(self) -> None:
        for survey in self._surveys.values():
            await survey.close()

    async def index(self, call: Call) -> Response:
        places = self._sources.refresh()
        watches = [self._sources.queue(place.name) for place in places.queues]
        await asyncio.gather(*(watch.main.renew(1.0) for watch in watches))
        return json_answer([self._row(watch) for watch in watches])

    def _row(self, watch: QueueWatch) -> dict[str, object]:
        reading = watch.main.reading
        value = reading.value
        places, collector = self._sources.places, self._sources.collector_place
        name = watch.place.name
        writers = [relay.part for relay in places.relays if relay.queue == name]
        if collector is not None and name in collector.queues:
            writers.append(collector.part)
        readers = [place.part for place in places.pipelines if place.queue == name]
        readers += [place.part for place in places.databases if place.queue == name]
        return {
            "name": name,
            "store": watch.source.store_url,
            "manifest_path": watch.place.manifest_path,
            "writers": writers,
            "readers": readers,
            "part": next(iter((*writers, *readers)), None),
            "depth_batches": None if value is None else value.depth,
            "manifest_bytes": None if value is None else value.manifest_bytes,
            "rate_batches_s": watch.batches.rate,
            "rate_records_s": watch.records.rate,
            "error": reading.error,
        }

    async def show(self, call: Call) -> Response:
        self._sources.refresh()
        watch = self._sources.queue(call.name)
        survey = self._survey(watch)
        reading, _ = await asyncio.gather(watch.main.fresh(wait_s=3.0), survey.renew(2.0))
        found = survey.reading
        gc = {
            "as_of_ms": found.at_ms,
            "error": found.error,
            "shards": None if found.value is None else [_gc_fields(one) for one in found.value],
        }
        fields = {**self._row(watch), "gc": gc, "conflicts": self._conflicts(watch.place.name)}
        fields |= {"history": watch.history.points(), "failing_since_ms": reading.failing_since_ms}
        fields["epochs"] = [{"epoch": epoch, "seen_at_ms": at_ms} for epoch, at_ms in watch.epochs]
        if reading.value is None:
            names = ("depth_records", "next_sequence", "first_sequence", "epoch", "oldest_age_s", "shards")
            return json_answer({**fields, **dict.fromkeys(names), "entries": []})
        entries = await watch.source.newest(ENTRIES_SHOWN)
        return json_answer({**fields, **await self._now(watch, reading.value, entries)})

    async def _now(
        self, watch: QueueWatch, reading: QueueReading, entries: list[EntryView]
    ) -> dict[str, object]:
        now = self._sources.clock.now_ms()
        return {
            "depth_records": await _records(watch, reading),
            "next_sequence": reading.following,
            "first_sequence": reading.first,
            "epoch": reading.epoch,
            "oldest_age_s": None if reading.oldest_ms is None else max(0.0, (now - reading.oldest_ms) / 1000),
            "shards": reading.shards if reading.is_sharded else None,
            "entries": [_entry_fields(entry, now) for entry in entries],
        }

    def _survey(self, watch: QueueWatch) -> Poller[list[QueueSurvey]]:
        name = watch.place.name
        if name not in self._surveys:
            self._surveys[name] = Poller(
                watch.source.surveys, self._sources.clock, interval_s=30.0, timeout_s=20.0
            )
        return self._surveys[name]

    def _conflicts(self, queue: str) -> dict[str, object]:
        """Return manifest write conflicts by process, and the processes that do not report them."""
        places, collector = self._sources.places, self._sources.collector_place
        known, unknown = {}, [relay.part for relay in places.relays if relay.queue == queue]
        unknown += [place.part for place in places.pipelines if place.queue == queue]
        reporting = [
            (place.part, self._sources.databases[place.name])
            for place in places.databases
            if place.queue == queue
        ]
        if collector is not None and queue in collector.queues:
            reporting.append((collector.part, self._sources.collector))
        for part, source in reporting:
            value = source.main.reading.value
            if value is None:
                unknown.append(part)
            else:
                known[part] = int(value.total(_CONFLICTS) or 0)
        return {"by_part": known, "unknown": unknown}


async def _records(watch: QueueWatch, reading: QueueReading) -> int | None:
    """Count all records in the queue by the footers of its batches. Return None for too many batches."""
    if reading.depth > _COUNTED_MAX:
        return None
    indexes = await watch.source.indexes()
    locations = [location for index in indexes.values() for _, location in index.locations()]
    sizes = await watch.source.sizes(locations)
    counts = [size.records for size in sizes.values()]
    return None if None in counts else sum(count for count in counts if count is not None)


def _entry_fields(entry: EntryView, now_ms: int) -> dict[str, object]:
    return {
        "shard": entry.shard,
        "sequence": entry.sequence,
        "location": entry.location,
        "records": entry.size.records,
        "bytes": entry.size.bytes,
        "at_ms": entry.at_ms,
        "age_s": None if entry.at_ms is None else max(0.0, (now_ms - entry.at_ms) / 1000),
        "producer": entry.producer,
        "metadata": [text_fields(payload, _METADATA_BYTES) for payload in entry.metadata[:_METADATA_SHOWN]],
        "metadata_count": len(entry.metadata),
    }


def _gc_fields(survey: QueueSurvey) -> dict[str, object]:
    names = ("floor_ms", "sealed_ms", "data_objects", "data_bytes", "unreferenced_objects")
    more = ("unreferenced_bytes", "collectable_objects", "foreign_objects", "dead_letters")
    return {"manifest": survey.manifest, **{name: getattr(survey, name) for name in (*names, *more)}}
