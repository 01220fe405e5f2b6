"""Hostile bytes: the decoders raise nothing but `SerializationError`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.mutations import Change, changes, mutated
from tests.unit.buffer.doubles import golden

from penstock.buffer import SerializationError
from penstock.buffer import manifest as m
from penstock.buffer.batch import decode_batch
from penstock.buffer.manifest import NewEntry
from penstock.buffer.sharded import read_layout
from penstock.buffer.side_objects import read_dequeued_log, read_floor
from penstock.objects.memory import MemoryStore

CAP = 4 * 1024 * 1024


def everything_about_a_batch(raw: bytes) -> None:
    block = decode_batch(memoryview(raw), bytes_max=CAP)
    records = block.to_list()
    assert len(records) == len(block)
    assert block.to_arrow().to_pylist() == records
    assert block.to_arrow_view().to_pylist() == records


def everything_about_a_manifest(raw: bytes) -> None:
    for operation in (
        lambda: m.append(raw, [NewEntry(location="x", metadata=[])]),
        lambda: m.dequeue(raw, 3),
        lambda: m.locate(raw, "ingest"),
        lambda: m.first_sequence(raw),
        lambda: m.set_epoch(raw, 5),
        lambda: m.index(golden("M2.manifest")).grown_into(raw),
    ):
        try:
            operation()
        except SerializationError:
            pass
    decoded = m.decode_manifest(raw)
    assert len(decoded.entries) == decoded.footer.entry_count
    assert list(m.index(raw).locations()) == [(e.sequence, e.location) for e in decoded.entries]


def a_layout(raw: bytes) -> None:
    async def look() -> None:
        store = MemoryStore()
        await store.put("q.shards/layout.json", raw)
        await read_layout(store, "q")

    asyncio.run(look())


DECODERS: dict[str, Callable[[bytes], object]] = {
    "manifest": everything_about_a_manifest,
    "batch": everything_about_a_batch,
    "ledger": read_dequeued_log,
    "floor": read_floor,
    "layout": a_layout,
}
SEEDS = {
    "manifest": ["M0.manifest", "M1.manifest", "M2.manifest", "M3.manifest", "foreign.manifest"],
    "batch": ["none.batch", "zstd.batch", "table.batch", "table-zstd-checksum.batch", "empty-zstd.batch"],
    "ledger": ["M4.ledger", "M4.manifest"],
    "floor": ["v1.floor"],
    "layout": ["v1.layout.json"],
}
EXAMPLES = {"manifest": 600, "batch": 600, "ledger": 200, "floor": 300, "layout": 100}
edits = changes(
    ["flip", "set", "cut", "insert", "double", "u32"], [2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4], most=6
)


@pytest.mark.parametrize("kind", DECODERS)
def test_mutations_of_valid_bytes_raise_nothing_but_serialization_errors(kind: str) -> None:
    @settings(max_examples=EXAMPLES[kind])
    @given(st.sampled_from(SEEDS[kind]), edits)
    def check(name: str, todo: list[Change]) -> None:
        try:
            DECODERS[kind](mutated(golden(name), todo))
        except SerializationError:
            pass

    check()


@pytest.mark.parametrize("kind", DECODERS)
def test_random_bytes_raise_nothing_but_serialization_errors(kind: str) -> None:
    @settings(max_examples=200)
    @given(st.binary(max_size=200), st.booleans())
    def check(raw: bytes, footed: bool) -> None:
        try:
            DECODERS[kind](raw + golden(SEEDS[kind][0])[-22:] if footed else raw)
        except SerializationError:
            pass

    check()


@pytest.mark.parametrize("name", ["M2.manifest", "foreign.manifest", "none.batch", "zstd.batch", "v1.floor"])
def test_every_single_bit_flip_is_survived(name: str) -> None:
    raw = golden(name)
    kind = next(kind for kind, names in SEEDS.items() if name in names)
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            DECODERS[kind](bytes(flipped))
        except SerializationError:
            pass


def test_a_bit_flip_under_the_checksum_of_a_batch_never_changes_a_record() -> None:
    raw = golden("table-zstd-checksum.batch")
    records = decode_batch(memoryview(raw)).to_list()
    for bit in range(8 * (len(raw) - 7)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert decode_batch(memoryview(bytes(flipped)), bytes_max=CAP).to_list() == records
        except SerializationError:
            pass
