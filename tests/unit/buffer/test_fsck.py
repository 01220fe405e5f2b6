from __future__ import annotations

from penstock.buffer import Consumer, ConsumerConfig, Metadata, Producer, ProducerConfig
from penstock.buffer import manifest as manifests
from penstock.buffer.fsck import audit
from penstock.buffer.inspect import QueueReader
from penstock.buffer.manifest import EMPTY_MANIFEST, NewEntry
from penstock.errors import MediaError
from penstock.findings import Finding, Severity
from penstock.objects import Blob, ByteRange, MemoryStore

MANIFEST = "ingest/manifest"


async def filled(batches: int = 3) -> MemoryStore:
    store = MemoryStore()
    async with Producer(ProducerConfig(store=store)) as producer:
        for number in range(batches):
            await producer.produce([b"%d" % number, b"x"])
            await producer.flush()
    return store


async def locations(store: MemoryStore) -> list[str]:
    return [descriptor.location for descriptor in await QueueReader(store, MANIFEST).entries()]


async def problems(store: MemoryStore, *, deep: bool = False) -> list[Finding]:
    findings = await audit(QueueReader(store, MANIFEST), "ingest", deep=deep)
    return [finding for finding in findings if finding.severity is Severity.PROBLEM]


async def test_a_queue_in_use_is_clean_and_unchanged() -> None:
    store = await filled()
    consumer = await Consumer.open(ConsumerConfig(store=store, gc_enabled=False))
    await consumer.next_batch()
    await consumer.ack_through(0)
    await consumer.close()
    before = {info.key: info.version for info in await store.list("")}
    findings = await audit(QueueReader(store, MANIFEST), "ingest", deep=True)
    assert [finding.severity for finding in findings] == [Severity.NOTE]
    assert "1 unreferenced" in findings[0].text
    assert {info.key: info.version for info in await store.list("")} == before


async def test_a_missing_queued_batch_is_a_problem() -> None:
    store = await filled()
    gone = (await locations(store))[1]
    await store.delete_many([gone])
    (finding,) = await problems(store)
    assert finding.subject == gone
    assert "as 1, but not in the store" in finding.text
    assert "restore" in finding.advice


async def test_a_damaged_batch_is_found_by_a_deep_check() -> None:
    store = await filled()
    damaged = (await locations(store))[2]
    await store.put(damaged, b"damaged, and longer than a footer")
    assert await problems(store) == []
    (finding,) = await problems(store, deep=True)
    assert finding.subject == damaged


async def test_a_damaged_manifest_is_one_problem_and_side_objects_are_still_checked() -> None:
    store = await filled()
    await store.put(MANIFEST, b"damaged, and longer than a footer")
    await store.put(f"{MANIFEST}.floor", b"damaged")
    await store.put(f"{MANIFEST}.ledger", b"damaged")
    found = await problems(store)
    assert [finding.subject for finding in found] == [MANIFEST, f"{MANIFEST}.ledger", f"{MANIFEST}.floor"]
    assert all(finding.advice for finding in found)


async def test_a_location_appended_twice_is_a_problem_even_if_the_first_has_left_the_queue() -> None:
    store = await filled(2)
    first, second = await locations(store)
    consumer = await Consumer.open(ConsumerConfig(store=store, gc_enabled=False))
    await consumer.next_batch()
    await consumer.ack_through(0)
    await consumer.close()
    raw = bytes((await store.get(MANIFEST)).data)
    twice = [NewEntry(location=location, metadata=()) for location in (first, second)]
    await store.put(MANIFEST, manifests.append(raw, twice))
    found = await problems(store)
    assert [finding.subject for finding in found] == [first, second]
    assert "before as 0" in found[0].text
    assert "before as 1" in found[1].text


async def test_metadata_beyond_the_records_is_a_problem() -> None:
    store = await filled(1)
    (location,) = await locations(store)
    metadata = [Metadata(start_index=7, ingestion_time_ms=0)]
    entry = NewEntry(location=location, metadata=metadata)
    await store.put(MANIFEST, manifests.append(EMPTY_MANIFEST, [entry]))
    (finding,) = await problems(store, deep=True)
    assert "2 records" in finding.text


async def test_a_damaged_transaction_log_is_a_problem() -> None:
    store = await filled(1)
    await store.put(f"{MANIFEST}.txn", b'{"version":1,"last":[["query",7]]}')
    assert await problems(store) == []
    await store.put(f"{MANIFEST}.txn", b"{")
    (finding,) = await problems(store)
    assert finding.subject == f"{MANIFEST}.txn"
    assert "restore an older version" in finding.advice


async def test_another_queue_in_the_same_folder_is_a_problem() -> None:
    store = await filled(1)
    await store.put("ingest/other.floor", b'{"version":1,"floor_ms":1,"sealed_ms":1}')
    (finding,) = await problems(store)
    assert "another queue" in finding.text


async def test_a_queue_below_the_prefix_is_noted_and_its_batches_are_not_garbage() -> None:
    store = await filled()
    config = ProducerConfig(store=store, data_path_prefix="ingest/eu", manifest_path="ingest/eu/manifest")
    async with Producer(config) as producer:
        await producer.produce([b"of the inner queue"])
    await store.put("ingest/eu/manifest.floor", b"of the inner queue")
    (finding,) = await audit(QueueReader(store, MANIFEST), "ingest")
    assert (finding.severity, finding.subject) == (Severity.NOTE, "ingest/eu")
    assert "3 objects" in finding.text


async def test_foreign_names_probes_and_dead_letters_are_noted_and_harmless() -> None:
    store = await filled(1)
    await store.put("ingest/readme.txt", b"foreign")
    await store.put(f"ingest/probe-{'0' * 32}", b"")
    await store.put(f"{MANIFEST}.dead/{7:020d}.json", b"{}")
    findings = await audit(QueueReader(store, MANIFEST), "ingest")
    assert {finding.severity for finding in findings} == {Severity.NOTE}
    assert len(findings) == 3


async def test_a_location_outside_the_folder_is_checked_one_by_one() -> None:
    store = await filled(1)
    raw = bytes((await store.get(MANIFEST)).data)
    await store.put(MANIFEST, manifests.append(raw, [NewEntry(location="elsewhere/x", metadata=())]))
    (finding,) = await problems(store)
    assert finding.subject == "elsewhere/x"


async def test_progress_reaches_the_number_of_batches() -> None:
    store = await filled(3)
    seen: list[tuple[int, int]] = []
    reader = QueueReader(store, MANIFEST)
    await audit(reader, "ingest", deep=True, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


class _BadDisk(MemoryStore):
    """A store on a device that cannot read some of its objects."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: set[str] = set()

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        if key in self.bad:
            raise MediaError(f"/store/{key}", 0, 4096, "Input/output error")
        return await super().get(key, byte_range)


async def test_objects_that_the_device_cannot_read_are_named_and_the_others_are_checked() -> None:
    store = _BadDisk()
    async with Producer(ProducerConfig(store=store)) as producer:
        for number in range(3):
            await producer.produce([b"%d" % number])
            await producer.flush()
    first = (await locations(store))[0]
    store.bad = {first, f"{MANIFEST}.floor"}
    found = await problems(store, deep=True)
    assert sorted(finding.subject for finding in found) == sorted(store.bad)
    assert all("bytes 0 to 4096" in finding.text for finding in found)
    store.bad = {MANIFEST}
    (finding,) = await problems(store, deep=True)
    assert finding.subject == MANIFEST
    assert "bytes 0 to 4096" in finding.text
