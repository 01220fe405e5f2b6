"""The path of one record: topic, relay, batch, micro-batch, table or database, dead letter.

A step is `here` if the record is in it now, `passed` if it went through, and `gone` if it was removed.
Otherwise it is `unknown`, and its text gives the reason.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from penstock.buffer import BatchDescriptor, Entry, entry_time_ms, find_tag
from penstock.console.app import Call, json_answer, text_fields
from penstock.console.overview import feed_position
from penstock.console.poller import reason_of
from penstock.console.sources import PipelineSource, QueueWatch, Sources
from penstock.errors import InvalidInput, NotFound, PenstockError
from penstock.http import Response
from penstock.ids import is_ulid
from penstock.topics import Page, check_topic_name
from penstock.up import PipelinePlace, RelayPlace

if TYPE_CHECKING:
    from penstock.spark import BatchLine, Letter, SinkCommit

_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_NUMBER_MAX: Final = 2**63 - 1
_QUEUE_S: Final = 15.0
"""The time limit for one queue and the steps after it."""
_WAYS: Final = (
    "say what to trace: ?topic=&seq= or ?buffer=&sequence=&index= or ?id= (a batch) or ?pipeline=&batch="
)
Stage: TypeAlias = Literal[
    "topic", "log", "relay", "buffer", "batch", "pipeline", "microbatch", "table", "database", "dead_letter"
]
State: TypeAlias = Literal["here", "passed", "gone", "unknown"]


class TracePanel:
    """The handler for the whole fleet."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    async def trace(self, call: Call) -> Response:
        self._sources.refresh()
        query = call.query
        if "topic" in query:
            steps = await self._topic(check_topic_name(query["topic"]), _number(call, "seq"))
        elif "buffer" in query:
            watch = self._sources.queue(query["buffer"])
            index = _number(call, "index") if query.get("index") else None
            shard = _number(call, "shard") if query.get("shard") else 0
            steps = await self._sequence(watch, shard, _number(call, "sequence"), index)
        elif "pipeline" in query:
            source = self._sources.pipeline(query["pipeline"])
            steps = await self._micro_batch(source, _number(call, "batch"))
        elif "id" in query:
            steps = await self._batch(query["id"].strip())
        else:
            raise InvalidInput(_WAYS)
        found, text = verdict(steps)
        return json_answer({"found": found, "text": text, "steps": steps})

    # --- from a topic --------------------------------------------------------------------------------------

    async def _topic(self, topic: str, seq: int) -> list[Step]:
        if not seq:
            raise InvalidInput("seq: the records of a topic are numbered from 1")
        steps = [await self._in_topic(topic, seq)]
        head = steps[0].detail.get("head")
        if isinstance(head, int) and seq > head:  # not written yet
            return steps
        for relay in self._sources.places.relays:
            if relay.topic == topic:
                steps += await self._or_unknown(relay.queue, self._relayed(relay, seq))
        return steps

    async def _or_unknown(self, queue: str, steps: Awaitable[list[Step]]) -> list[Step]:
        """Search one queue. If it hangs or cannot be read, return an unknown step, to search elsewhere."""
        try:
            async with asyncio.timeout(_QUEUE_S):
                return await steps
        except (PenstockError, TimeoutError, OSError) as error:
            text = f"the queue {queue} cannot be read: {reason_of(error)}"
            return [Step(stage="buffer", state="unknown", text=text, detail={"queue": queue})]

    async def _in_topic(self, topic: str, seq: int) -> Step:
        try:
            page = await self._sources.topics.source.client.diff(topic, seq - 1, limit=1, include_tags=True)
        except NotFound:
            raise
        except PenstockError as error:
            text = f"the topics server cannot be read: {reason_of(error)}"
            return Step(stage="topic", state="unknown", text=text, detail={"topic": topic, "seq": seq})
        return topic_step(topic, seq, page)

    async def _relayed(self, relay: RelayPlace, seq: int) -> list[Step]:
        watch = self._sources.queue(relay.queue)
        reading = (await watch.main.fresh(wait_s=3.0)).value
        if reading is None:
            text = f"the queue {relay.queue} cannot be read: {watch.main.reading.error}"
            return [Step(stage="relay", state="unknown", text=text, detail={"queue": relay.queue})]
        position = reading.positions.get(relay.app)
        steps = [relay_step(relay.topic, seq, relay.queue, relay.app, position)]
        if steps[0].state != "passed":
            return steps
        found = await watch.source.relayed(relay.app, relay.topic, seq)
        if found is None and self._is_alone(relay):
            found = await watch.source.search(seq)
        if found is None:
            text = (
                f"its batch left the queue {relay.queue} before the console read it, or was collected, and a "
                "queue does not record which topic records its past batches contained"
            )
            return [*steps, Step(stage="buffer", state="unknown", text=text, detail={"queue": relay.queue})]
        return [*steps, *await self._sequence(watch, found.shard, found.sequence, found.index)]

    def _is_alone(self, relay: RelayPlace) -> bool:
        """Return whether this relay is the only known producer of its queue."""
        collector = self._sources.collector_place
        others = [one for one in self._sources.places.relays if one.queue == relay.queue and one != relay]
        return not others and (collector is None or relay.queue not in collector.queues)

    # --- from a queue --------------------------------------------------------------------------------------

    async def _sequence(self, watch: QueueWatch, shard: int, sequence: int, index: int | None) -> list[Step]:
        name = watch.place.name
        entry, location = await watch.source.find(shard, sequence)
        following = await watch.source.following(shard)
        detail: dict[str, object] = {"queue": name, "shard": shard, "sequence": sequence, "index": index}
        if sequence >= following:
            text = f"{name} has sequences up to {following - 1}: {sequence} is not produced yet"
            return [Step(stage="buffer", state="unknown", text=text, detail=detail)]
        steps = [_in_queue(name, sequence, entry, location, detail)]
        place = entry.location if entry is not None else location
        steps.append(await self._stored(watch, entry, place, index))
        if steps[-1].detail.get("records") is not None and steps[-1].state == "unknown":
            return steps[-1:]  # the batch has no such record
        for pipeline in self._readers(name):
            steps += await self._piped(self._sources.pipeline(pipeline.name), shard, sequence, index)
        steps += [step async for step in self._fed(name, sequence)]
        return steps

    def _readers(self, queue: str) -> Iterator[PipelinePlace]:
        return (place for place in self._sources.places.pipelines if place.queue == queue)

    async def _stored(
        self, watch: QueueWatch, entry: Entry | None, location: str | None, index: int | None
    ) -> Step:
        """Return the step of the batch object and the record in it."""
        if location is None:
            text = "the location of its batch is no longer known"
            return Step(stage="batch", state="unknown", text=text)
        detail: dict[str, object] = {"location": location, "index": index}
        size = (await watch.source.sizes([location]))[location]
        detail |= {"records": size.records, "bytes": size.bytes}
        if size.records is None:
            text = f"the batch {location} was collected: all of it had been consumed"
            if entry is not None:
                text = f"the batch {location} is missing or damaged, although it is in the queue"
            return Step(stage="batch", state="gone", text=text, detail=detail)
        if index is not None and index >= size.records:
            text = f"the batch {location} has {size.records} records: there is none at {index}"
            return Step(stage="batch", state="unknown", text=text, detail=detail)
        if index is not None:
            detail |= await _record(watch, location, index)
        where = "" if index is None else f", as record {index}"
        text = f"in the batch {location}{where}"
        return Step(stage="batch", state="here", text=text, detail=detail)

    async def _piped(
        self, source: PipelineSource, shard: int, sequence: int, index: int | None
    ) -> list[Step]:
        name, books = source.place.name, source.books
        try:
            line = await source.ask(books.find, shard, sequence)
            if line is None:
                reading = (await source.main.fresh(wait_s=3.0)).value
                reached = None if reading is None or not reading.batches else reading.batches[-1].end
                return [micro_batch_step(name, None, reached)]
            letter = None
            if index is not None and line.dead:
                letter = await source.ask(books.letter, shard, sequence, index)
            return [micro_batch_step(name, line, None), *await self._written(source, line, letter)]
        except (PenstockError, OSError) as error:
            text = f"the ledger of {name} cannot be read: {reason_of(error)}"
            return [Step(stage="pipeline", state="unknown", text=text, detail={"pipeline": name})]

    async def _written(self, source: PipelineSource, line: BatchLine, letter: Letter | None) -> list[Step]:
        commits = await source.ask(source.books.commits, line.batch)
        steps = [table_step(commit, letter) for commit in commits]
        return [*steps, letter_step(letter)] if letter is not None else steps

    async def _fed(self, queue: str, sequence: int) -> AsyncIterator[Step]:
        for place in self._sources.places.databases:
            if place.queue == queue:
                reading = await self._sources.databases[place.name].main.fresh(wait_s=2.0)
                through = None if reading.value is None else feed_position(reading.value)
                is_known = reading.value is not None
                yield database_step(place.name, sequence, through, is_known=is_known, error=reading.error)

    # --- from a batch, from a micro-batch ------------------------------------------------------------------

    async def _batch(self, text: str) -> list[Step]:
        """Trace a batch by its ULID or its location in one of the queues."""
        name = text.rpartition("/")[2].removesuffix(".batch")
        if not is_ulid(name):
            raise InvalidInput(f"{text[:80]!r} is neither the ULID of a batch nor its location")
        watches = list(self._sources.queues.values())
        unread: list[Step] = []
        for search in (self._referred, self._lying):
            found = await asyncio.gather(
                *(self._or_unknown(watch.place.name, search(watch, text, name)) for watch in watches)
            )
            for steps in found:
                if any(step.state != "unknown" for step in steps):
                    return steps
            unread = unread or [step for steps in found for step in steps]
        note = "no queue of the plan has this batch, or it was consumed and collected"
        if unread:
            note = "no queue of the plan that can be read has this batch"
        return [*unread, Step(stage="batch", state="unknown", text=note, detail={"id": name})]

    async def _referred(self, watch: QueueWatch, text: str, name: str) -> list[Step]:
        """Find a batch that is in the queue or was dequeued recently."""
        found = await watch.source.locate(text)
        return [] if found is None else await self._sequence(watch, found[0], found[1], None)

    async def _lying(self, watch: QueueWatch, text: str, name: str) -> list[Step]:
        """Find a batch object in the folder of the queue or of a shard."""
        folders = [prefix for _, prefix in (await watch.source.readers()).values()]
        sizes = await watch.source.sizes([f"{folder.strip('/')}/{name}.batch" for folder in folders])
        for location, size in sizes.items():
            if size.records is not None:
                why = "it was consumed some time ago, or never appended"
                detail: dict[str, object] = {"location": location, "records": size.records}
                note = f"the batch {location} is stored, but no queue refers to it: {why}"
                return [Step(stage="batch", state="here", text=note, detail=detail)]
        return []

    async def _micro_batch(self, source: PipelineSource, number: int) -> list[Step]:
        name = source.place.name
        line = await source.ask(source.books.micro_batch, number)
        if line is None:
            text = f"the ledger of {name} has no micro-batch {number}"
            return [Step(stage="microbatch", state="unknown", text=text, detail={"pipeline": name})]
        return [micro_batch_step(name, line, None), *await self._written(source, line, None)]


def _in_queue(
    name: str, sequence: int, entry: Entry | None, location: str | None, detail: dict[str, object]
) -> Step:
    if entry is not None:
        tag = find_tag(entry.tail)
        detail = {**detail, "location": entry.location, "producer": None if tag is None else tag.app}
        text = f"in the queue {name} as sequence {sequence}"
        return Step(stage="buffer", state="here", at_ms=entry_time_ms(entry), text=text, detail=detail)
    detail = {**detail, "location": location}
    text = f"left the queue {name}: its consumer has acknowledged sequence {sequence}"
    return Step(stage="buffer", state="passed", text=text, detail=detail)


async def _record(watch: QueueWatch, location: str, index: int) -> dict[str, object]:
    """Return the record's text, or the reason why the batch cannot be read."""
    try:
        batch = await watch.source.fetch(BatchDescriptor(sequence=0, location=location, metadata=()))
        return text_fields(bytes(batch.entries[index]))
    except PenstockError as error:
        return {"text": None, "cut": False, "error": reason_of(error)}


def _number(call: Call, name: str) -> int:
    text = call.query.get(name, "")
    if not _NUMBER.fullmatch(text) or int(text) > _NUMBER_MAX:
        raise InvalidInput(f"{name}: expected a whole number, found {text[:40]!r}; {_WAYS}")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a record's path."""

    stage: Stage
    state: State
    text: str
    at_ms: int | None = None
    detail: Mapping[str, object] = field(default_factory=dict)


def topic_step(topic: str, seq: int, page: Page) -> Step:
    """Return the step of a record in its topic. `page` is the page after the previous record."""
    detail: dict[str, object] = {"topic": topic, "seq": seq, "head": page.head_seq}
    records = page.records()
    if records and records[0].seq == seq:
        found = records[0]
        detail |= {"tag": found.tag, "node": found.node, **text_fields(bytes(found.data))}
        return Step(
            stage="topic",
            state="here",
            at_ms=found.ts_ms,
            text=f"record {seq} is in the topic {topic}",
            detail=detail,
        )
    if seq > page.head_seq:
        text = f"{topic} ends at {page.head_seq}: record {seq} is not written yet"
        return Step(stage="topic", state="unknown", text=text, detail=detail)
    lost = page.tombstone
    if lost is not None and lost.gap_from <= seq <= lost.gap_to:
        why = {"cap": "evicted by the topic's cap", "ttl": "expired by age"}.get(lost.reason, lost.reason)
        return Step(stage="topic", state="gone", text=f"record {seq} was {why}", detail=detail)
    return Step(
        stage="topic",
        state="gone",
        text=f"record {seq} was deleted (in a queue: acknowledged), or no record has this sequence",
        detail=detail,
    )


def relay_step(topic: str, seq: int, queue: str, app: str, position: int | None) -> Step:
    """Return the step of a relay, which may have moved the record."""
    detail: dict[str, object] = {"app": app, "queue": queue, "position": position}
    if position is not None and seq <= position:
        text = f"relayed into the queue {queue}, which has {topic} up to {position}"
        return Step(stage="relay", state="passed", text=text, detail=detail)
    reached = "nothing" if position is None else f"only up to {position}"
    text = f"not relayed yet: the queue {queue} has {reached} of {topic}"
    return Step(stage="relay", state="unknown", text=text, detail=detail)


def micro_batch_step(pipeline: str, line: BatchLine | None, reached: Mapping[int, int] | None) -> Step:
    """Return the step of the micro-batch that read a sequence. `reached` is the pipeline's position."""
    if line is None:
        if reached is None:
            text = f"the pipeline {pipeline} has no micro-batch yet"
        else:
            text = f"no micro-batch of {pipeline} has read it yet"
        detail: dict[str, object] = {"pipeline": pipeline, "reached": reached}
        return Step(stage="microbatch", state="unknown", text=text, detail=detail)
    return Step(
        stage="microbatch",
        state="passed",
        at_ms=line.at_ms,
        text=f"read by micro-batch {line.batch} of {pipeline}, with {line.read} records",
        detail={
            "pipeline": pipeline,
            "batch": line.batch,
            "from": line.start,
            "to": line.end,
            "records": line.read,
            "dead": line.dead,
            "rows": line.rows,
        },
    )


def table_step(commit: SinkCommit, letter: Letter | None) -> Step:
    """Return the step of a sink. A record that became a dead letter is not in it."""
    detail: dict[str, object] = {
        "sink": commit.sink,
        "kind": commit.kind,
        "place": commit.place,
        "version": commit.version,
        "rows": commit.rows,
    }
    if commit.has_it is None:
        return Step(stage="table", state="unknown", text=commit.text, detail=detail)
    if not commit.has_it:
        return Step(stage="table", state="unknown", text=commit.text, detail=detail)
    where = f"{commit.sink} ({commit.kind})"
    if letter is not None:
        text = f"{where} has this micro-batch; the record itself went to the dead letters"
        return Step(stage="table", state="passed", at_ms=commit.at_ms, text=text, detail=detail)
    version = "" if commit.version is None else f", in version {commit.version} of the table"
    text = f"{where} has this micro-batch{version}"
    return Step(stage="table", state="here", at_ms=commit.at_ms, text=text, detail=detail)


def letter_step(letter: Letter) -> Step:
    """Return the step of a record that could not be decoded."""
    again = ", and was put back into the queue by a redrive" if letter.redriven else ""
    detail: dict[str, object] = {
        "reason": letter.reason,
        "redriven": letter.redriven,
        **text_fields(letter.value or b""),
    }
    text = f"a dead letter: {letter.reason}{again}"
    return Step(stage="dead_letter", state="here", at_ms=letter.at_ms, text=text, detail=detail)


def database_step(
    name: str, sequence: int, through: int | None, *, is_known: bool, error: str | None
) -> Step:
    """Return the step of a database that reads a sequence from its queue."""
    detail: dict[str, object] = {"database": name, "durable_through": through}
    if not is_known:
        text = f"the position of {name} is unknown: {error or 'it is not running'}"
        return Step(stage="database", state="unknown", text=text, detail=detail)
    if through is not None and sequence <= through:
        text = f"durable in {name}, which has its queue up to {through}"
        return Step(stage="database", state="here", text=text, detail=detail)
    reached = "nothing" if through is None else f"its queue up to {through}"
    return Step(stage="database", state="unknown", text=f"not in {name} yet: it has {reached}", detail=detail)


def verdict(steps: Sequence[Step]) -> tuple[bool, str]:
    """Return whether anything was found, and a sentence that says where the record is."""
    found = [step for step in steps if step.state != "unknown"]
    if not found:
        return False, steps[-1].text if steps else "nothing of the plan knows it"
    here = [step for step in found if step.state == "here"]
    return True, (here or found)[-1].text
