"""The console's API of topics: the list, one topic with its sequence line, and the routers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from penstock.console.app import Call, json_answer, number_of, text_fields
from penstock.console.poller import Meter, Trail
from penstock.console.sources import Sources
from penstock.http import Response
from penstock.servers import read_cursor
from penstock.topics import (
    PAGE_SIZE_MAX,
    Record,
    RouterConfig,
    Tombstone,
    TopicConfig,
    TopicNotFound,
    TopicState,
    check_topic_name,
)

_PAGE: Final = 200
_LETTERS_SHOWN: Final = 20
_HISTORY: Final = 300
_HISTORIES_MAX: Final = 200
_PREFIX_MAX: Final = 255
Kind: TypeAlias = Literal["live", "tombstone", "deleted", "evicted", "expired"]

_KINDS: Final[dict[str, Kind]] = {"cap": "evicted", "ttl": "expired"}
_DELETED: Final = "deleted, or sequences without a record"
"""A server that was killed continues after its reserved sequences, which leaves some without a record."""
_REASONS: Final = {
    "cap": "evicted by the topic's cap",
    "ttl": "expired by the topic's age limit",
    "mixed": "evicted by the cap and expired by age",
    "source_trim": "removed from their source before they were copied",
    "lost": "they were lost with damaged files of the log",
    "recreated": "the topic was removed and created again",
    "from_seq_too_old": "removed before they were read",
}


class TopicsPanel:
    """Handlers for the topics server of the fleet."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._trails: dict[str, tuple[Meter, Trail]] = {}

    async def index(self, call: Call) -> Response:
        self._sources.refresh()
        topics = self._sources.topics
        prefix = call.query.get("prefix", "")[:_PREFIX_MAX]
        cursor = call.query.get("after", "")
        read_cursor(cursor)
        limit = number_of(call, "limit", _PAGE, least=1, most=PAGE_SIZE_MAX)
        has_configs = call.query.get("config", "true") != "false"
        found, following = await topics.source.page(prefix, cursor, limit, has_configs=has_configs)
        numbers = (await topics.numbers.fresh(wait_s=0.5)).value
        is_all = not prefix and not cursor and following is None
        total = len(found) if is_all else None if prefix or numbers is None else numbers.topics
        rows = [
            {
                "name": summary.topic,
                "class": None if config is None else config.durability,
                "records": summary.count,
                "bytes": summary.bytes,
                "head": summary.head_seq,
                "earliest": summary.earliest_seq,
                "rate": None if rate is None else round(rate, 3),
                "retention": None if config is None else _retention(config),
                "queue": None if config is None else config.type == "queue",
            }
            for summary, config, rate in found
        ]
        return json_answer({"topics": rows, "next": following, "total": total})

    async def show(self, call: Call) -> Response:
        self._sources.refresh()
        name = check_topic_name(call.name)
        source = self._sources.topics.source
        state = await source.state(name)
        tombstone, scanned, scanned_from = await source.scan(state)
        line = sequence_line(
            earliest=state.earliest_seq,
            head=state.head_seq,
            count=state.count,
            tombstone=tombstone,
            scanned=scanned,
            scanned_from=scanned_from,
        )
        meter, trail = self._trail(name)
        now = self._sources.clock
        meter.read(now.monotonic(), state.head_seq)
        trail.add(now.now_ms(), None if meter.rate is None else round(meter.rate, 3))
        fields = {
            "name": state.topic,
            "class": state.config.durability,
            "config": state.config,
            "retention": _retention(state.config),
            "head": state.head_seq,
            "earliest": state.earliest_seq,
            "records": state.count,
            "bytes": state.bytes,
            "rate": meter.rate,
            "history": trail.points(),
            "last_write_ms": state.last_write_ms,
            "line": [
                {
                    "from": each.first,
                    "to": each.last,
                    "kind": each.kind,
                    "reason": each.reason,
                    "live": each.live,
                }
                for each in line
            ],
            "relays": [relay for relay in self._sources.places.relays if relay.topic == name],
            "queue": await self._queue(state),
        }
        return json_answer(fields)

    def _trail(self, name: str) -> tuple[Meter, Trail]:
        if name not in self._trails:
            while len(self._trails) >= _HISTORIES_MAX:
                self._trails.pop(next(iter(self._trails)))
            self._trails[name] = (Meter(), Trail(_HISTORY))
        return self._trails[name]

    async def _queue(self, state: TopicState) -> dict[str, object] | None:
        """Return the numbers of jobs by state, and the newest dead letters."""
        if state.queue is None:
            return None
        config = state.config
        return {
            "ready": state.queue.ready,
            "in_flight": state.queue.in_flight,
            "dead_lettered": state.queue.dead_lettered,
            "lease_ms": config.lease_ms,
            "max_deliveries": config.max_deliveries,
            "dead_letter": config.dead_letter,
            "letters": await self._letters(config.dead_letter),
        }

    async def _letters(self, topic: str | None) -> list[dict[str, object]]:
        if topic is None:
            return []
        try:
            page = await self._sources.topics.source.newest(topic, _LETTERS_SHOWN)
        except TopicNotFound:
            return []
        return [record_fields(record) for record in page.records()]

    async def routers(self, call: Call) -> Response:
        self._sources.refresh()
        views = await self._sources.topics.source.routers()
        nodes = sorted({end for view in views for end in (view.summary.source, view.summary.dest)})
        edges = [
            {
                "id": view.summary.router,
                "from": view.summary.source,
                "to": view.summary.dest,
                "filter": _filter(view.config),
                "guarantee": view.summary.guarantee,
                "copied": view.summary.forwarded_total,
                "behind": None,
                "state": None,  # the topics API has neither
            }
            for view in views
        ]
        return json_answer({"nodes": [{"id": name} for name in nodes], "edges": edges})


def record_fields(record: Record) -> dict[str, object]:
    """Return the fields of a record. A long text is cut."""
    meta = record.meta
    return {
        "seq": record.seq,
        "ts_ms": record.ts_ms,
        "tag": record.tag,
        "node": record.node,
        **text_fields(bytes(record.data)),
        "meta": None if meta is None else text_fields(bytes(meta), 1024)["text"],
    }


def _filter(config: RouterConfig | None) -> str | None:
    if config is None or config.filter is None:
        return None
    return f"tag {config.filter.value}{'*' if config.filter.is_prefix else ''}"


def _retention(config: TopicConfig) -> dict[str, object]:
    return {
        "ttl_ms": config.ttl_ms or None,
        "cap_records": config.cap_records or None,
        "cap_bytes": config.cap_bytes or None,
        "discard": config.discard,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The sequences `first` to `last`, inclusive. `live` of them can be read."""

    first: int
    last: int
    kind: Kind
    reason: str
    live: int = 0


def sequence_line(
    *,
    earliest: int,
    head: int,
    count: int,
    tombstone: Tombstone | None,
    scanned: Sequence[int] = (),
    scanned_from: int | None = None,
) -> list[Stretch]:
    """Return the ranges of the line from 1 to `head`.

    `tombstone` is the tombstone that a reader from the beginning gets. `scanned` are the live sequences from
    `scanned_from`, ascending. Without them the live part is one range, which has gaps if `count` is smaller.
    """
    line = list(_lost(tombstone))
    begun = line[-1].last + 1 if line else 1
    live_from = earliest if count else head + 1
    if begun < live_from:
        line.append(Stretch(first=begun, last=live_from - 1, kind="deleted", reason=_DELETED))
    if not count:
        return line
    if head - earliest + 1 == count:
        line.append(Stretch(first=earliest, last=head, kind="live", reason="", live=count))
        return line
    line += _with_holes(earliest, head, count, scanned, scanned_from)
    return line


def _lost(tombstone: Tombstone | None) -> Iterator[Stretch]:
    if tombstone is not None and tombstone.gap_to >= tombstone.gap_from:
        yield Stretch(
            first=tombstone.gap_from,
            last=tombstone.gap_to,
            kind=_KINDS.get(tombstone.reason, "tombstone"),
            reason=_REASONS.get(tombstone.reason, tombstone.reason),
        )


def _with_holes(
    earliest: int, head: int, count: int, scanned: Sequence[int], scanned_from: int | None
) -> Iterator[Stretch]:
    start = head + 1 if scanned_from is None else max(scanned_from, earliest)
    if start > earliest:
        holes = (start - earliest) - (count - len(scanned))
        reason = f"{holes} of them deleted" if holes > 0 else ""
        yield Stretch(first=earliest, last=start - 1, kind="live", reason=reason, live=count - len(scanned))
    at = start
    for first, last in _runs(scanned):
        if first > at:
            yield Stretch(first=at, last=first - 1, kind="deleted", reason=_DELETED)
        yield Stretch(first=first, last=last, kind="live", reason="", live=last - first + 1)
        at = last + 1
    if at <= head:
        yield Stretch(first=at, last=head, kind="deleted", reason=_DELETED)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for number in numbers:
        if first is None or last is None:
            first = last = number
        elif number == last + 1:
            last = number
        else:
            yield first, last
            first = last = number
    if first is not None and last is not None:
        yield first, last
