"""Putting dead letters back into the queue, each exactly once, even after crashes.

A redrive has a number k. Its objects are in the ledger's store:

    redrive/identity.json      the id of the appending application, created once for each ledger
    redrive/{k}.json           the letters of redrive k, created if absent and never changed
    redrive/{k}.done.json      redrive k is finished

1. k is one more than the last number. The plan stores the letters chosen from those that no earlier redrive
   has. If another redrive has written k first, this one fails without an effect.
2. The records are stored as batches and appended to the queue in one write, under the transaction
   (redrive/identity, k). A second append of k is a no-op.
3. The end is recorded.

A crash before step 1 has no effect. After step 1, the next redrive finds k unfinished and repeats step 2 with
the same letters; if the first append was applied, this is a no-op. For the same reason, two redrives that
finish k at the same time append once. k + 1 starts only after k is in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.buffer import (
    CompressionType,
    Metadata,
    ProducerConfig,
    StaleTransaction,
    Transaction,
    append_batches,
    last_version,
    read_shards,
    store_batch,
)
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Conflict, Corrupt, InvalidInput, NotFound, OutcomeUnknown
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.objects import ObjectStore, StoreConfig, open_store
from penstock.spark.pipeline.dead_letters import (
    BODIES,
    HEADS,
    Letters,
    Position,
    distinct_letters,
    letters_at,
    letters_without,
    read_letters,
)
from penstock.spark.pipeline.outputs import table_of
from penstock.spark.pipeline.spec import PipelineSpec
from penstock.spark.tables.spec import TableSpec

_log = logging.getLogger(__name__)

BATCH_BYTES: Final = 16 << 20
_FOLDER: Final = "redrive"
_IDENTITY: Final = f"{_FOLDER}/identity.json"
_PLAN: Final = re.compile(rf"{_FOLDER}/(\d+)\.json")
_DONE: Final = re.compile(rf"{_FOLDER}/(\d+)\.done\.json")

ReadLetters: TypeAlias = "Callable[[TableSpec, tuple[str, ...], tuple[int, int] | None], Letters]"


class _Identity(msgspec.Struct, frozen=True):
    id: str


class _Plan(msgspec.Struct, frozen=True):
    token: str
    """A unique id that identifies our own plan if the response to its write was lost."""
    letters: list[Position]
    reasons: dict[str, int]
    at_ms: int


class _Done(msgspec.Struct, frozen=True):
    records: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven:
    """The result of one redrive."""

    number: int
    records: int
    reasons: dict[str, int] = field(default_factory=dict)
    first: int | None = None
    """The sequence of the first batch, or None if an earlier append was already applied."""
    shard: int | None = None
    resumed: bool = False
    """Whether an earlier call had started it without finishing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redrive:
    """The result of a call, or of a dry run."""

    finished: tuple[Redriven, ...] = ()
    """Earlier, interrupted redrives that this call finished first."""
    done: Redriven | None = None
    """The redrive of this call, or None in a dry run or if there was nothing to redrive."""
    found: int = 0
    """The number of chosen letters."""
    reasons: dict[str, int] = field(default_factory=dict)
    left: int = 0
    """The number of matching letters beyond the limit."""
    unfinished: tuple[int, ...] = ()
    """The interrupted redrives that a dry run found."""


def redrive(spec: PipelineSpec, wanted: Wanted, *, dry_run: bool = False) -> Redrive:
    """Put the wanted dead letters of a pipeline back into its queue. Blocks; does not need Spark.

    Raise `InvalidInput` if the pipeline has no dead-letter table, `Conflict` if another redrive came first,
    `OutcomeUnknown` if the records may be in the queue (run it again to check), or `StorageError`.
    """
    return asyncio.run(_redrive(spec, wanted, dry_run))


def redriven_places(spec: PipelineSpec) -> set[Position]:
    """Return the positions of all letters in finished and unfinished redrives. Blocks; raise `Corrupt`."""
    return asyncio.run(_redriven_places(spec))


async def _redriven_places(spec: PipelineSpec) -> set[Position]:
    ledger = open_store(spec.ledger_config)
    try:
        plans, _ = await RedriveDriver(spec, ledger, ledger).plans()
        return {place for plan in plans.values() for place in plan.letters}
    finally:
        await ledger.close()


async def _redrive(spec: PipelineSpec, wanted: Wanted, dry_run: bool) -> Redrive:
    buffer = spec.source.buffer
    ledger = open_store(spec.ledger_config)
    queue = open_store(StoreConfig(url=buffer.store, options=dict(buffer.store_options)))
    try:
        driver = RedriveDriver(spec, ledger, queue)
        return await (driver.preview(wanted) if dry_run else driver.run(wanted))
    finally:
        await queue.close()
        await ledger.close()


class RedriveDriver:
    """The steps of a redrive, on open stores."""

    def __init__(
        self,
        spec: PipelineSpec,
        ledger: ObjectStore,
        queue: ObjectStore,
        *,
        read: ReadLetters = read_letters,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
    ) -> None:
        letters = spec.dead_letter if spec.letters is None else spec.letters
        table = None if letters is None else table_of(letters)
        if table is None:
            raise InvalidInput(
                f"{spec.name} keeps no dead letters because on_error is {spec.on_error}: nothing to redrive"
            )
        self._spec = spec
        self._table = table
        self._ledger = ledger
        self._queue = queue
        self._read = read
        self._clock = clock
        self._rng = rng

    async def preview(self, wanted: Wanted) -> Redrive:
        """Choose letters as `run` does, without changing anything."""
        plans, done = await self.plans()
        chosen, left = await self._choose(plans, wanted)
        return Redrive(
            found=chosen.num_rows,
            reasons=reasons_of(chosen),
            left=left,
            unfinished=tuple(number for number in sorted(plans) if number not in done),
        )

    async def run(self, wanted: Wanted) -> Redrive:
        """Finish interrupted redrives, then redrive the wanted letters."""
        plans, done = await self.plans()
        await self._check_identity(plans, done)
        finished = [
            await self._finish(number, plans[number], resumed=True)
            for number in sorted(plans)
            if number not in done
        ]
        chosen, left = await self._choose(plans, wanted)
        if not chosen.num_rows:
            return Redrive(finished=tuple(finished))
        number = await self._next_number(plans, done)
        plan = await self._write_plan(number, chosen)
        result = await self._finish(number, plan, resumed=False)
        return Redrive(
            finished=tuple(finished), done=result, found=chosen.num_rows, reasons=plan.reasons, left=left
        )

    async def plans(self) -> tuple[dict[int, _Plan], set[int]]:
        """Return the plans by redrive number, and the numbers of the finished redrives."""
        keys = [info.key for info in await self._ledger.list(_FOLDER)]
        done = {int(found[1]) for key in keys if (found := _DONE.fullmatch(key))}
        numbers = [int(found[1]) for key in keys if (found := _PLAN.fullmatch(key))]
        return {number: await self._load(_plan_key(number)) for number in numbers}, done

    async def _load(self, key: str) -> _Plan:
        raw = bytes((await self._ledger.get(key)).data)
        try:
            return msgspec.json.decode(raw, type=_Plan)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(f"{key} in {self._ledger.url} does not decode: {error}. Restore it") from error

    async def _choose(self, plans: dict[int, _Plan], wanted: Wanted) -> tuple[Letters, int]:
        heads = await asyncio.to_thread(self._read, self._table, HEADS, wanted.sequences)
        taken = [place for plan in plans.values() for place in plan.letters]
        everything = choose(heads, self._spec.name, taken, replace(wanted, limit=None))
        chosen = everything if wanted.limit is None else everything.slice(0, wanted.limit)
        return chosen, everything.num_rows - chosen.num_rows

    async def _check_identity(self, plans: Collection[int], done: Collection[int]) -> None:
        """Raise `Corrupt` if an unfinished redrive may have appended under an identity that is lost."""
        try:
            await self._known_identity()
        except NotFound:
            unfinished = sorted(set(plans) - set(done))
            if unfinished and (done or len(plans) > 1):
                raise Corrupt(
                    f"{_IDENTITY} in {self._ledger.url} is missing, and without it nothing shows whether "
                    f"redrive {unfinished[0]} has put its letters back. Restore it"
                ) from None

    async def _next_number(self, plans: Collection[int], done: Collection[int]) -> int:
        """Return the number after the last redrive in the ledger and the queue.

        An append under a number that the queue already has would be a no-op. Log a warning for redrives whose
        plans are lost.
        """
        try:
            app = f"{_FOLDER}/{await self._known_identity()}"
        except NotFound:
            queued = None
        else:
            config, _ = await self._target(app)
            queued = await last_version(config, app)
        last = max([*plans, *done, queued or 0], default=0)
        lost = sorted(set(range(1, last + 1)) - set(plans))
        if lost:
            _log.warning(
                "the ledger %s has lost %s, which lists letters that were put back before: they may be put "
                "back again. Restore it",
                self._ledger.url,
                ", ".join(_plan_key(number) for number in lost[:10]),
            )
        return last + 1

    async def _write_plan(self, number: int, chosen: Letters) -> _Plan:
        """Run step 1. Raise `Conflict` if another redrive has this number."""
        columns = (chosen[name].to_pylist() for name in ("shard", "sequence", "index"))
        now_ms = self._clock.now_ms()
        plan = _Plan(
            token=mint_ulid(now_ms, self._rng),
            letters=list(zip(*columns, strict=True)),
            reasons=reasons_of(chosen),
            at_ms=now_ms,
        )
        key = _plan_key(number)
        try:
            await self._ledger.put_if_absent(key, msgspec.json.encode(plan))
        except OutcomeUnknown as error:
            try:
                written = await self._load(key)
            except NotFound:
                raise error from None
            if written.token != plan.token:
                raise Conflict(f"another redrive of {self._spec.name} came first; run it again") from error
        except Conflict as error:
            raise Conflict(f"another redrive of {self._spec.name} came first; run it again") from error
        return plan

    async def _finish(self, number: int, plan: _Plan, *, resumed: bool) -> Redriven:
        """Run steps 2 and 3, for the first time or again."""
        transaction = Transaction(app=f"{_FOLDER}/{await self._identity()}", version=number)
        config, shard = await self._target(transaction.app)
        last = await last_version(config, transaction.app) if resumed else None
        first: int | None = None
        if last is None or last < number:
            first = await self._append(config, transaction, plan)
        note = _Done(records=len(plan.letters), at_ms=self._clock.now_ms())
        await self._ledger.put(f"{_FOLDER}/{number:08}.done.json", msgspec.json.encode(note))
        return Redriven(
            number=number,
            records=len(plan.letters),
            reasons=plan.reasons,
            first=first,
            shard=shard,
            resumed=resumed,
        )

    async def _append(self, config: ProducerConfig, transaction: Transaction, plan: _Plan) -> int | None:
        sequences = [place[1] for place in plan.letters]
        bodies = await asyncio.to_thread(self._read, self._table, BODIES, (min(sequences), max(sequences)))
        letters = letters_at(bodies, self._spec.name, plan.letters)
        if letters.num_rows < len(plan.letters):
            raise Corrupt(
                f"{len(plan.letters) - letters.num_rows} of the {len(plan.letters)} letters of redrive "
                f"{transaction.version} are no longer in {self._table.where}; restore the table"
            )
        stored = [
            await store_batch(
                self._queue,
                config.prefix,
                batch.values,
                compression=CompressionType.NONE,
                metadata=batch.metadata,
                clock=self._clock,
                rng=self._rng,
            )
            for batch in lay_out(letters, BATCH_BYTES, self._clock.now_ms())
        ]
        try:
            appended = await append_batches(config, stored, transaction, clock=self._clock, rng=self._rng)
        except StaleTransaction:
            # Another process has finished this redrive and started the next one.
            return None
        return appended.first

    async def _target(self, app: str) -> tuple[ProducerConfig, int | None]:
        """Return the producer's configuration for `app`, and its shard or None."""
        buffer = self._spec.source.buffer
        config = ProducerConfig(
            store=self._queue, manifest_path=buffer.manifest_path, data_path_prefix=buffer.data_path_prefix
        )
        shard, own = (await read_shards(self._queue, config)).of_app(app)
        return own, shard

    async def _identity(self) -> str:
        fresh = _Identity(id=mint_ulid(self._clock.now_ms(), self._rng))
        try:
            return await self._known_identity()
        except NotFound:
            pass
        try:
            await self._ledger.put_if_absent(_IDENTITY, msgspec.json.encode(fresh))
        except (Conflict, OutcomeUnknown):
            return await self._known_identity()
        return fresh.id

    async def _known_identity(self) -> str:
        raw = bytes((await self._ledger.get(_IDENTITY)).data)
        try:
            return msgspec.json.decode(raw, type=_Identity).id
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            where = f"{_IDENTITY} in {self._ledger.url}"
            raise Corrupt(f"{where} does not decode: {error}. Restore it") from error


def _plan_key(number: int) -> str:
    return f"{_FOLDER}/{number:08}.json"


_FRAMING_BYTES: Final = 8
_ITEM_BYTES: Final = 16
_METADATA_BYTES_MAX: Final = 1 << 20
"""The most bytes that one batch may add to the manifest, which every append transfers completely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A selection of letters. By default it matches all of them."""

    reason: str | None = None
    """Text that the reason must contain, ignoring case."""
    sequences: tuple[int, int] | None = None
    """The first and last sequence."""
    since_ms: int | None = None
    """The earliest time at which the letter was written."""
    limit: int | None = None
    positions: frozenset[Position] | None = None
    """The positions of the letters."""


def choose(heads: Letters, pipeline: str, taken: Iterable[Position], wanted: Wanted) -> Letters:
    """Return the letters to redrive, in queue order, each position once.

    Skip gaps (index -1), which are not records, and letters that an earlier redrive has `taken`.
    """
    if not heads.num_rows:
        return heads
    rows = heads.filter((pc.field("pipeline") == pipeline) & (pc.field("index") >= 0))
    if wanted.reason is not None:
        rows = rows.filter(pc.match_substring(rows["reason"], wanted.reason, ignore_case=True))
    if wanted.sequences is not None:
        first, last = wanted.sequences
        rows = rows.filter((pc.field("sequence") >= first) & (pc.field("sequence") <= last))
    if wanted.since_ms is not None:
        since = pa.scalar(wanted.since_ms * 1000, pa.timestamp("us", "UTC"))
        rows = rows.filter(pc.greater_equal(rows["at"].cast(pa.timestamp("us", "UTC")), since))
    rows = letters_without(distinct_letters(rows), taken)
    if wanted.positions is not None:
        rows = letters_at(rows, pipeline, sorted(wanted.positions))
    return rows if wanted.limit is None else rows.slice(0, wanted.limit)


def reasons_of(heads: Letters) -> dict[str, int]:
    """Return the number of letters by reason, the most frequent first."""
    counted = pc.value_counts(heads["reason"].combine_chunks()) if heads.num_rows else []
    pairs = ((str(one["values"].as_py()), int(one["counts"].as_py())) for one in counted)
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterBatch:
    """Records for one batch object, with their original metadata."""

    values: pa.Array
    metadata: tuple[Metadata, ...]


def lay_out(letters: Letters, batch_bytes: int, now_ms: int) -> list[LetterBatch]:
    """Split letters into batches of about `batch_bytes`. A letter without an ingestion time gets `now_ms`."""
    if not letters.num_rows:
        return []
    values = letters["value"].combine_chunks().cast(pa.binary())
    sizes = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    runs = _runs(letters, now_ms)
    marks = np.zeros(len(sizes), np.int64)
    for start, (_, payload) in runs.items():
        marks[start] = _ITEM_BYTES + len(payload)
    batches: list[LetterBatch] = []
    starts = np.fromiter(runs, np.int64)
    for first, end in _cuts(sizes + _FRAMING_BYTES, marks, batch_bytes):
        begin = int(np.searchsorted(starts, first, side="right")) - 1
        until = int(np.searchsorted(starts, end, side="left"))
        items = (
            Metadata(
                start_index=max(0, int(start) - first),
                ingestion_time_ms=runs[int(start)][0],
                payload=runs[int(start)][1],
            )
            for start in starts[begin:until]
        )
        batches.append(LetterBatch(values=values.slice(first, end - first), metadata=tuple(items)))
    return batches


def _runs(letters: Letters, now_ms: int) -> dict[int, tuple[int, bytes]]:
    """Return (time, payload) by row, for each row at which the metadata or the time changes."""
    payloads = pc.fill_null(letters["metadata"].combine_chunks().cast(pa.binary()), b"")
    moments_ms = letters["ingestion_time"].combine_chunks().cast(pa.timestamp("ms", "UTC"), safe=False)
    times = pc.fill_null(moments_ms.cast(pa.int64()), now_ms)
    keys = payloads.dictionary_encode().indices.to_numpy()
    moments = times.to_numpy()
    changes = np.flatnonzero((keys[1:] != keys[:-1]) | (moments[1:] != moments[:-1])) + 1
    starts = [0, *changes.tolist()]
    return {start: (int(moments[start]), payloads[start].as_py()) for start in starts}


def _cuts(weights: np.ndarray, marks: np.ndarray, batch_bytes: int) -> list[tuple[int, int]]:
    """Return ranges of rows with weights of up to `batch_bytes` and metadata of up to its own bound."""
    cuts: list[tuple[int, int]] = []
    total, noted = np.cumsum(weights), np.cumsum(marks)
    first = 0
    while first < len(weights):
        used = int(total[first - 1]) if first else 0
        passed = int(noted[first - 1]) if first else 0
        by_size = int(np.searchsorted(total, used + batch_bytes, side="right"))
        by_notes = int(np.searchsorted(noted, passed + _METADATA_BYTES_MAX, side="right"))
        end = max(first + 1, min(by_size, by_notes))
        cuts.append((first, end))
        first = end
    return cuts
