"""The console's API of pipelines: micro-batches, checkpoint, sinks, balance and dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.console.app import Call, json_answer, number_of, payload_fields
from penstock.console.overview import backlog_of, balance_of, lines_rate
from penstock.console.sources import PipelineSource, Sources
from penstock.console.topology import state_of
from penstock.errors import InvalidInput
from penstock.http import Response

if TYPE_CHECKING:
    from penstock.spark import BatchLine, BooksReading, Letter

_LETTERS: Final = 100
_LETTERS_MAX: Final = 500


class PipelinesPanel:
    """Handlers for the pipelines of the fleet."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    async def index(self, call: Call) -> Response:
        places = self._sources.refresh()
        found = [self._sources.pipeline(place.name) for place in places.pipelines]
        await asyncio.gather(*(source.main.renew(2.0) for source in found))
        return json_answer([self._row(source) for source in found])

    async def show(self, call: Call) -> Response:
        self._sources.refresh()
        source = self._sources.pipeline(call.name)
        queue = self._sources.queues.get(source.place.queue or "")
        waits = [source.main.renew(5.0), source.balance.renew(0.5)]
        if queue is not None:
            waits.append(queue.main.renew(2.0))
        await asyncio.gather(*waits)
        books = source.main.reading.value
        batches: Sequence[BatchLine] = () if books is None else books.batches
        fields = self._row(source)
        fields["balance"] = balance_of(source)
        fields["batches"] = [_batch_fields(line) for line in batches]
        return json_answer(fields)

    def _row(self, source: PipelineSource) -> dict[str, object]:
        place, reading = source.place, source.main.reading
        part = self._sources.part(place.part)
        books = reading.value
        now = self._sources.clock.now_ms()
        last = None if books is None or not books.batches else books.batches[-1]
        lines = [] if books is None else [(line.at_ms, line.read) for line in books.batches]
        return {
            "name": place.name,
            "part": place.part,
            "file": place.file,
            "queue": place.queue,
            "state": None if part is None else state_of(part),
            "last_error": None if part is None else part.last_error,
            "error": reading.error,
            "query": None if books is None else books.query,
            "checkpoint": None if books is None else _checkpoint(books),
            "last_batch": None if last is None else last.batch,
            "last_at_ms": None if last is None else last.at_ms,
            "rate_records_s": lines_rate(lines, now),
            "backlog": self._backlog(source, books),
            "lag_s": self._lag_s(source, books),
            "sinks": [] if books is None else books.sinks,
        }

    def _backlog(self, source: PipelineSource, books: BooksReading | None) -> int | None:
        """Count the batches of the queue that no micro-batch has delivered."""
        queue = self._sources.queues.get(source.place.queue or "")
        held = None if queue is None else queue.main.reading.value
        if books is None or held is None:
            return None
        return backlog_of(held, books.batches[-1].end if books.batches else {})

    def _lag_s(self, source: PipelineSource, books: BooksReading | None) -> float | None:
        queue = self._sources.queues.get(source.place.queue or "")
        if books is None or queue is None or queue.main.reading.value is None:
            return None
        oldest = queue.source.oldest_from(books.batches[-1].end if books.batches else {})
        return 0.0 if oldest is None else max(0.0, (self._sources.clock.now_ms() - oldest) / 1000)

    async def letters(self, call: Call) -> Response:
        self._sources.refresh()
        source = self._sources.pipeline(call.name)
        after = position_of(call.query.get("after", ""))
        limit = number_of(call, "limit", _LETTERS, least=1, most=_LETTERS_MAX)
        page = await source.ask(source.books.letters, after, limit)
        if page is None:
            return json_answer({"letters": [], "next": None, "total": 0, "left": 0, "kept": False})
        following = None if page.following is None else position_text(page.following)
        return json_answer(
            {
                "letters": [letter_fields(letter) for letter in page.letters],
                "next": following,
                "total": page.total,
                "left": page.left,
                "kept": True,
            }
        )


def _batch_fields(line: BatchLine) -> dict[str, object]:
    rate = line.read * 1000 / line.took_ms if line.took_ms else None
    return {
        "id": line.batch,
        "at_ms": line.at_ms,
        "duration_ms": line.took_ms or None,
        "records_in": line.read,
        "rows": line.rows,
        "rows_per_s": None if rate is None else round(rate, 3),
        "dead_letters": line.dead,
        "skipped": line.skipped,
        "from": line.start,
        "to": line.end,
    }


def _checkpoint(books: BooksReading) -> dict[str, object]:
    end = books.batches[-1].end if books.batches else None
    return {"path": books.checkpoint, "planned": books.planned, "done": books.done, "position": end}


def letter_fields(letter: Letter) -> dict[str, object]:
    return {
        "position": position_text((letter.shard, letter.sequence, letter.index)),
        "shard": letter.shard,
        "sequence": letter.sequence,
        "index": letter.index,
        "reason": letter.reason,
        "at_ms": letter.at_ms,
        "redriven": letter.redriven,
        **payload_fields(letter.value),
    }


def position_text(position: tuple[int, int, int]) -> str:
    return ":".join(map(str, position))


def position_of(text: str) -> tuple[int, int, int] | None:
    """Parse `shard:sequence:index`. Return None for an empty text. Raise `InvalidInput`."""
    if not text:
        return None
    parts = text.split(":")
    try:
        shard, sequence, index = (int(part) for part in parts)
    except ValueError:
        raise InvalidInput(f"expected a position as shard:sequence:index, found {text[:60]!r}") from None
    if not (0 <= shard < 2**31 and 0 <= sequence < 2**63 and -1 <= index < 2**31):
        raise InvalidInput(f"{text[:60]!r} is not the position of a record")
    return shard, sequence, index
