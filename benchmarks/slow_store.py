"""Producers under difficult conditions: slow writes, and a consumer of another implementation."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from typing import Any

from penstock.buffer import OutcomeUnknown, Producer, ProducerConfig, manifest
from penstock.buffer.batch import decode_batch
from penstock.errors import Conflict, NotFound
from penstock.objects import ObjectStore
from penstock.objects.local import LocalStore
from penstock.objects.memory import MemoryStore
from rounds import Plan, scratch
from table import Row

__all__ = ["foreign", "run"]

_MANIFEST = "ingest/manifest"
_TICK_S = 0.01
_SETTLED_S = 4
_NOTE = (
    "default settings, one 100 B record per call, memory store whose every write takes the given time, the "
    "stall after a fifth of the run; the rate offered, less the growth of the calls that wait, by their mean "
    f"over two halves of whole seconds after the first {_SETTLED_S} s (a commit of a slow store has the "
    "calls of a second, so counting by commits would be off by as many); 'to the last call' counts the "
    "start and the last writes too, which take as long as the store"
)
_FOREIGN_NOTE = (
    "each producer has 4 callers, every call its own batch (flush_interval 0); the consumer dequeues after "
    "every batch and writes no ledger; once: records that were consumed exactly once over those acknowledged"
)


class SlowStore(MemoryStore):
    """A memory store whose writes take `put_s`, with one that takes `stall_s` longer, and whose reads take
    `get_s`."""

    def __init__(
        self, put_s: float, *, get_s: float = 0.0, stall_s: float = 0.0, stall_after_s: float = 0.0
    ) -> None:
        super().__init__()
        self._put_s, self._get_s = put_s, get_s
        self._stalls = [stall_s] if stall_s else []
        self._stall_at = time.monotonic() + stall_after_s

    async def _write_delay(self) -> None:
        stall_s = self._stalls.pop() if self._stalls and time.monotonic() > self._stall_at else 0.0
        await asyncio.sleep(self._put_s + stall_s)

    async def put(self, *args: Any, **kwargs: Any) -> Any:
        await self._write_delay()
        return await super().put(*args, **kwargs)

    async def put_if_absent(self, *args: Any, **kwargs: Any) -> Any:
        await self._write_delay()
        return await super().put_if_absent(*args, **kwargs)

    async def put_if_match(self, *args: Any, **kwargs: Any) -> Any:
        await self._write_delay()
        return await super().put_if_match(*args, **kwargs)

    async def get(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(self._get_s)
        return await super().get(*args, **kwargs)

    async def get_if_changed(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(self._get_s)
        return await super().get_if_changed(*args, **kwargs)


def run(plan: Plan) -> list[Row]:
    """Measure writes of 40 ms, 450 ms and 1 s, and one stall of 1.5 s, at 200 and 1,000 calls/s."""
    kinds = {"40 ms": (0.04, 0.0), "450 ms": (0.45, 0.0), "1 s": (1.0, 0.0), "40 ms, one 1.5 s": (0.04, 1.5)}
    seconds = plan.pick(24, 12)
    rows: list[Row] = []
    for rate in (200, 1000):
        for name, (put_s, stall_s) in kinds.items():
            store = SlowStore(put_s, stall_s=stall_s, stall_after_s=0.2 * seconds)
            offered, steady, whole = asyncio.run(_offer(store, rate, seconds))
            for what, achieved, bar in (("", steady, 0.95), (", to the last call", whole, None)):
                rows.append(
                    Row(
                        section="7 slow store",
                        what=f"writes of {name}, {rate:,} calls/s{what}",
                        ours=achieved,
                        ceiling=offered,
                        against="offered",
                        unit="calls/s",
                        bar=bar,
                        note=_NOTE,
                    )
                )
    return rows


async def _offer(store: ObjectStore, rate: int, seconds: int) -> tuple[float, float, float]:
    """Offer calls at a fixed rate. Return that rate and the two rates at which they became durable."""
    watches: list[asyncio.Task[None]] = []
    durable: list[float] = []
    backlog: list[int] = []
    record = b"x" * 100

    async def call(producer: Producer) -> None:
        handle = await producer.produce([record])
        await handle.watcher.await_durable()
        durable.append(time.monotonic())

    async with Producer(ProducerConfig(store=store)) as producer:
        await call(producer)  # the first call imports the modules for encoding
        durable.clear()
        began = time.monotonic()
        for tick in range(round(seconds / _TICK_S)):
            await asyncio.sleep(max(0.0, began + tick * _TICK_S - time.monotonic()))
            watches += [asyncio.create_task(call(producer)) for _ in range(round(rate * _TICK_S))]
            backlog.append(len(watches) - len(durable))
        ended = time.monotonic()
        await asyncio.gather(*watches)
    half = (seconds - _SETTLED_S) // 2
    middle = round(half / _TICK_S)
    growth = (statistics.mean(backlog[-middle:]) - statistics.mean(backlog[-2 * middle : -middle])) / half
    offered = len(watches) / (ended - began)
    return offered, offered - growth, len(watches) / (durable[-1] - durable[0])


def foreign(plan: Plan) -> list[Row]:
    """Measure two and four producers with a consumer that writes no ledger."""
    rows: list[Row] = []
    for producers in (2, 4):
        with scratch(plan) as root:
            rows += _foreign_rows(LocalStore(root), producers, "local store", plan.pick(5, 2))
        slow = SlowStore(0.02, get_s=0.01)
        rows += _foreign_rows(slow, producers, "20 ms writes, 10 ms reads", plan.pick(10, 4))
    return rows


def _foreign_rows(store: ObjectStore, producers: int, where: str, seconds: int) -> list[Row]:
    acked, unknown, writes, conflicts, consumed = asyncio.run(_fleet(store, producers, seconds))
    once = sum(consumed[record] == 1 for record in acked)
    figures: tuple[tuple[str, float, str, float | None, float | None], ...] = (
        ("conflicts", 100 * conflicts / max(1, writes), "% of writes", None, None),
        ("unknown outcomes", unknown, f"of {len(acked) + unknown:,} calls", None, None),
        ("records consumed once", once, "records", len(acked), 1.0),
    )
    return [
        Row(
            section="8 foreign consumer",
            what=f"{what}, {producers} producers, {where}",
            ours=value,
            unit=unit,
            ceiling=ceiling,
            against="acknowledged" if ceiling else "",
            bar=bar,
            note=_FOREIGN_NOTE,
        )
        for what, value, unit, ceiling, bar in figures
    ]


async def _fleet(
    store: ObjectStore, count: int, seconds: int
) -> tuple[list[bytes], int, int, int, Counter[bytes]]:
    acked: list[bytes] = []
    unknown = writes = conflicts = 0
    locations: list[str] = []
    until = time.monotonic() + seconds
    done = asyncio.Event()

    async def producing(name: int) -> None:
        nonlocal unknown, writes, conflicts
        config = ProducerConfig(store=store, flush_interval="0s")
        async with Producer(config, store=store) as producer:

            async def caller(place: int) -> None:
                nonlocal unknown
                number = 0
                while time.monotonic() < until:
                    record = b"%d-%d-%d" % (name, place, number)
                    number += 1
                    handle = await producer.produce([record])
                    try:
                        await handle.watcher.await_durable()
                        acked.append(record)
                    except OutcomeUnknown:
                        unknown += 1

            await asyncio.gather(*(caller(place) for place in range(4)))
            appender = producer._appender
            writes, conflicts = writes + appender.writes, conflicts + appender.conflicts

    async def consuming() -> None:
        while True:
            last = done.is_set()
            try:
                blob = await store.get(_MANIFEST)
                raw = bytes(blob.data)
                footer = manifest.read_footer(raw)
                if footer.entry_count:
                    left = manifest.dequeue(raw, footer.next_sequence - 1)
                    await store.put_if_match(_MANIFEST, left, blob.version)
                    locations.extend(entry.location for entry in manifest.decode_manifest(raw).entries)
            except (Conflict, NotFound):
                continue
            if last:
                return
            await asyncio.sleep(0.002)

    consumer = asyncio.create_task(consuming())
    await asyncio.gather(*(producing(name) for name in range(count)))
    done.set()
    await consumer
    consumed: Counter[bytes] = Counter()
    for location in locations:
        consumed.update(decode_batch((await store.get(location)).data).to_list())
    await store.close()
    return acked, unknown, writes, conflicts, consumed
