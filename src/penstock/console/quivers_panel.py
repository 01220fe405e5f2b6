"""The console's API of Quiver: segments, the progress of subscribers, and disk space."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.console.app import Call, json_answer
from penstock.console.http_poller import Exposition
from penstock.console.sources import QuiverReading, QuiverSource, Sources
from penstock.http import Response
from penstock.quiver import Ranges, SegmentInfo, SubscriberLook, slot_name

SEGMENTS_SHOWN: Final = 2000
_GAPS_SHOWN: Final = 500


class QuiversPanel:
    """Handlers for the Quiver directories of the fleet."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    async def index(self, call: Call) -> Response:
        places = self._sources.refresh()
        found = [self._sources.quiver(place.name) for place in places.quivers]
        await asyncio.gather(*(source.main.renew(2.0) for source in found))
        return json_answer([_row(source) for source in found])

    async def show(self, call: Call) -> Response:
        self._sources.refresh()
        source = self._sources.quiver(call.name)
        reading = await source.main.fresh(wait_s=5.0)
        fields = {**_row(source), "failing_since_ms": reading.failing_since_ms}
        value = reading.value
        if value is None:
            return json_answer({**fields, "segments": [], "subscribers": [], "damaged": []})
        now = self._sources.clock.now_ms()
        metrics = self._metrics(source)
        shown = value.segments[-SEGMENTS_SHOWN:]
        fields["segments"] = _segments(value, shown, now)
        fields["segments_left_out"] = len(value.segments) - len(shown)
        fields["subscribers"] = [
            _subscriber(core, look, value, metrics, now) for core, look in value.subscribers
        ]
        fields["damaged"] = value.damaged
        fields["metrics_error"] = None if metrics is not None else self._sources.collector.main.reading.error
        return json_answer(fields)

    def _metrics(self, source: QuiverSource) -> Exposition | None:
        """Return the metrics of the process that has the directory open, or None."""
        collector = self._sources.collector_place
        if collector is None or source.place.name not in collector.quivers:
            return None
        return self._sources.collector.main.reading.value


def _row(source: QuiverSource) -> dict[str, object]:
    place, reading = source.place, source.main.reading
    value = reading.value
    budget: dict[str, object] = {
        "disk_bytes": None if value is None else value.disk_bytes,
        "budget_bytes": place.budget_bytes,
        "free_bytes": None if value is None else value.free_bytes,
    }
    return {
        "name": place.name,
        "part": place.part,
        "path": place.path,
        "segment_count": None if value is None else len(value.segments),
        "items": None if value is None else value.items,
        "subscriber_count": None if value is None else len(value.subscribers),
        "budget": budget,
        "error": reading.error,
    }


@dataclass(frozen=True, slots=True)
class _Mark:
    """The progress of one subscriber, prepared for many lookups."""

    hwm: int
    complete: Ranges
    partial: Mapping[int, int]

    @classmethod
    def of(cls, look: SubscriberLook) -> _Mark:
        return cls(look.subscriber.hwm, Ranges(look.complete), look.partial)

    def is_done(self, seq: int) -> bool:
        return seq <= self.hwm or seq in self.complete


def segment_states(seqs: Iterable[int], looks: Iterable[SubscriberLook]) -> list[str]:
    """Return the state of each segment: `done` if every subscriber has resolved it, `partly` if some have, or
    `pending`."""
    marks = [_Mark.of(look) for look in looks]
    states = []
    for seq in seqs:
        done = [mark.is_done(seq) for mark in marks]
        begun = any(done) or any(seq in mark.partial for mark in marks)
        states.append("done" if done and all(done) else "partly" if begun else "pending")
    return states


def _segments(reading: QuiverReading, shown: Sequence[SegmentInfo], now_ms: int) -> list[dict[str, object]]:
    fields = []
    for core in sorted({info.core_id for info in shown}):
        infos = [info for info in shown if info.core_id == core]
        looks = [look for number, look in reading.subscribers if number == core]
        states = segment_states((info.seq for info in infos), looks)
        fields += [_segment(info, state, now_ms) for info, state in zip(infos, states, strict=True)]
    return fields


def _segment(info: SegmentInfo, state: str, now_ms: int) -> dict[str, object]:
    return {
        "id": info.seq,
        "core": info.core_id,
        "slot": slot_name(info.slot),
        "signal": info.signal.value,
        "records": info.item_count,
        "bundles": info.bundle_count,
        "bytes": info.file_size,
        "at_ms": info.ingest_ns_max // 1_000_000,
        "age_s": max(0.0, (now_ms - info.ingest_ns_max / 1_000_000) / 1000),
        "state": state,
    }


def gaps_of(look: SubscriberLook) -> list[tuple[int, int]]:
    """Return the unresolved ranges between the high-water mark and the last resolved segment."""
    reached = max([last for _, last in look.complete] + list(look.partial), default=look.subscriber.hwm)
    return Ranges(look.complete).missing(look.subscriber.hwm + 1, reached)


def _subscriber(
    core: int, look: SubscriberLook, reading: QuiverReading, metrics: Exposition | None, now_ms: int
) -> dict[str, object]:
    one = look.subscriber
    live = {} if metrics is None else _live(metrics, one.name)
    oldest = one.oldest_pending_ns
    return {
        "id": one.name,
        "core": core,
        "state": one.state.name.lower(),
        "high_water": one.hwm,
        "highest": look.highest,
        "gaps": gaps_of(look)[:_GAPS_SHOWN],
        "complete": look.complete[:_GAPS_SHOWN],
        "partial": [
            {"segment": seq, "resolved": count} for seq, count in list(look.partial.items())[:_GAPS_SHOWN]
        ],
        "backlog": one.pending_segments,
        "lag_s": None if oldest is None else max(0.0, now_ms / 1000 - oldest / 1e9),
        "acked": one.acked,
        "retries": one.nacked,
        "lost": one.dropped + one.expired + one.rejected,
        "in_flight": live.get("in_flight"),
        "deferred": live.get("deferred"),
    }


def _live(metrics: Exposition, name: str) -> Mapping[str, int | None]:
    """Return the numbers of bundles in flight and deferred, which only the process knows."""
    found: dict[str, int | None] = {}
    for field in ("in_flight", "deferred"):
        value = metrics.by(f"quiver_subscriber_{field}", "subscriber").get(name)
        found[field] = None if value is None else int(value)
    return found
