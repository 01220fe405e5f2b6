"""Read-only consistency checks of a queue, which report each problem and its remedy.

The checks are pure functions over data that was read. `audit` reads the data and calls them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from penstock import errors
from penstock.buffer import manifest
from penstock.buffer.errors import BatchMissing, BufferError, SerializationError, storage_error
from penstock.buffer.fetch import BatchDescriptor
from penstock.buffer.inspect import Inventory, QueueReader, sort_objects
from penstock.buffer.manifest import EntryIndex
from penstock.buffer.manifest_file import ManifestFile
from penstock.buffer.side_objects import read_dequeued_log, read_floor
from penstock.buffer.transactions import read_transaction_log
from penstock.findings import Finding, Severity

PARALLEL_FETCHES = 4
_SIDE_SUFFIXES = (".floor", ".ledger", ".txn")

_RESTORE = (
    "restore the object from a backup or an older version of it; if it is permanently lost, let the consumer "
    "set the batch aside with on_bad_batch: skip"
)


def _problem(subject: str, text: str, advice: str) -> Finding:
    return Finding(severity=Severity.PROBLEM, subject=subject, text=text, advice=advice)


def _note(subject: str, text: str, advice: str = "") -> Finding:
    return Finding(severity=Severity.NOTE, subject=subject, text=text, advice=advice)


def check_layout(index: EntryIndex, dequeued: Mapping[int, str], prefix: str) -> Iterator[Finding]:
    """Compare the entries with each other and with the dequeued log."""
    first_at: dict[str, int] = {}
    before = {location: sequence for sequence, location in dequeued.items()}
    for sequence, location in index.locations():
        earlier = first_at.setdefault(location, sequence)
        if earlier == sequence and before.get(location, sequence) < sequence:
            earlier = before[location]
        if earlier != sequence:
            yield _problem(
                location,
                f"is in the queue as {sequence}, and was appended before as {earlier}",
                "a client appended it twice: the consumer must apply it once (see batch.duplicate_of)",
            )
        if not location.startswith(f"{prefix}/"):
            yield _note(
                location, f"of sequence {sequence} lies outside {prefix}/", "the collector never deletes it"
            )


def check_objects(index: EntryIndex, inventory: Inventory, prefix: str) -> Iterator[Finding]:
    """Compare the listed objects with the queue."""
    present = {info.key for info in inventory.referenced}
    for sequence, location in index.locations():
        if location.startswith(f"{prefix}/") and location not in present:
            yield _problem(location, f"is in the queue as {sequence}, but not in the store", _RESTORE)
    for info in inventory.foreign:
        if info.key.endswith(_SIDE_SUFFIXES):
            yield _problem(
                info.key,
                "belongs to another queue that shares this folder",
                "give each queue its own folder: their collectors delete each other's batches",
            )
        else:
            yield _note(info.key, f"has a foreign name ({info.size} bytes)", "the collector never deletes it")
    for folder, size in sorted(Counter(_folder(info.key, prefix) for info in inventory.nested).items()):
        yield _note(
            folder,
            f"{size} objects in a folder below {prefix}/: another queue's, or not a queue's at all",
            "the collector of this queue never deletes them",
        )
    for info in inventory.probes:
        yield _note(info.key, "was left by a check that was cut short", "it may be deleted")
    if inventory.unreferenced:
        size = sum(info.size for info in inventory.unreferenced)
        yield _note(
            prefix,
            f"{len(inventory.unreferenced)} unreferenced batches ({size} bytes): consumed or never appended",
            "the consumer's garbage collection deletes them after the grace period",
        )


def _folder(key: str, prefix: str) -> str:
    """Return the folder directly below `prefix` that holds `key`."""
    return f"{prefix}/{key.removeprefix(f'{prefix}/').partition('/')[0]}"


def check_side(
    raw_dequeued: bytes | None, raw_floor: bytes | None, raw_transactions: bytes | None, path: str, first: int
) -> Iterator[Finding]:
    """Check the side objects of the manifest."""
    yield from _check_dequeued_log(raw_dequeued, path, first)
    yield from _check_floor(raw_floor, path)
    try:
        _ = {} if raw_transactions is None else read_transaction_log(raw_transactions)
    except SerializationError as error:
        yield _problem(
            f"{path}.txn",
            str(error),
            "restore an older version of it: until then nothing can be appended under a transaction, nor "
            "dequeued that was",
        )


def _check_dequeued_log(raw_dequeued: bytes | None, path: str, first: int) -> Iterator[Finding]:
    try:
        dequeued = {} if raw_dequeued is None else read_dequeued_log(raw_dequeued)
        if dequeued and max(dequeued) + 1 < first:
            yield _note(
                f"{path}.ledger",
                f"ends at {max(dequeued)}, but the queue starts at {first}",
                "another client dequeued in between; an append in doubt there cannot be looked up",
            )
    except SerializationError as error:
        yield _problem(
            f"{path}.ledger",
            f"does not decode: {error}",
            "keep a copy of it, then let the consumer run: its next dequeue writes a new one",
        )


def _check_floor(raw_floor: bytes | None, path: str) -> Iterator[Finding]:
    try:
        floor = None if raw_floor is None else read_floor(raw_floor)
        if floor is not None and floor.sealed_ms > floor.floor_ms:
            yield _problem(
                f"{path}.floor",
                f"is sealed at {floor.sealed_ms}, above its floor of {floor.floor_ms}",
                "restore an older version of it: batches may be deleted that producers still append",
            )
    except SerializationError as error:
        yield _problem(
            f"{path}.floor",
            str(error),
            "restore an older version of it: until then nothing can be appended or collected",
        )


async def audit(
    reader: QueueReader,
    prefix: str,
    *,
    deep: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """Return all problems of a queue. With `deep`, fetch and decode every batch in it.

    Raise `StorageError` only if the store cannot be read.
    """
    file, store = reader.file, reader.store
    findings: list[Finding] = []
    try:
        snapshot = await reader.snapshot()
        index = manifest.index(snapshot.raw)
        for number in range(len(index)):
            _ = index[number]
    except SerializationError as error:
        advice = "stop producers and consumer, keep a copy, and restore an older version of the manifest"
        findings.append(_problem(file.path, str(error), advice))
        index = manifest.index(manifest.EMPTY_MANIFEST)
    undecoded = bool(findings)
    try:
        listed = await store.list(prefix)
        raw_dequeued = await _side(file, file.dequeued_path, findings)
        raw_floor = await _side(file, file.floor_path, findings)
        raw_transactions = await _side(file, file.transactions_path, findings)
        letters = [info.key for info in await store.list(f"{file.path}.dead") if info.key.endswith(".json")]
    except errors.PenstockError as error:
        raise storage_error(error, f"looking at {prefix} in {store.url}") from error
    findings += check_side(
        raw_dequeued, raw_floor, raw_transactions, file.path, 0 if undecoded else index.first
    )
    for key in letters:
        findings.append(await _check_letter(reader, key, deep=deep))
    if undecoded:
        return findings
    findings += check_layout(index, _dequeued(raw_dequeued), prefix)
    inventory = sort_objects(listed, (location for _, location in index.locations()), file.path, prefix)
    found = list(check_objects(index, inventory, prefix))
    found = await _still_there(reader, found)
    findings += found
    gone = {finding.subject for finding in found if finding.severity is Severity.PROBLEM}
    outside = [
        BatchDescriptor.of(index[n])
        for n in range(len(index))
        if index[n].location not in gone and (deep or not index[n].location.startswith(f"{prefix}/"))
    ]
    findings += await _check_batches(reader, outside, on_progress)
    return findings


async def _check_letter(reader: QueueReader, key: str, *, deep: bool) -> Finding:
    """A dead letter. `deep` also looks whether it can be read."""
    if deep:
        try:
            msgspec.json.decode((await reader.store.get(key)).data)
        except errors.NotFound:
            pass  # it was handled meanwhile
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, errors.Corrupt) as error:
            text = f"is a dead letter that cannot be read: {error}"
            return _problem(key, text, "keep it, look at its bytes, and produce what it had again")
        except errors.PenstockError as error:
            return _problem(key, f"could not be read: {error}", "check the store, then run again")
    return _note(key, "is a batch that was set aside", "look at its reason, repair and produce it again")


async def _side(file: ManifestFile, path: str, findings: list[Finding]) -> bytes | None:
    """Read a side object, or return None if it is absent or cannot be read. Report the latter."""
    try:
        return (await file.read_side(path))[0]
    except errors.Corrupt as error:
        advice = "restore an older version of it, and check the device"
        findings.append(_problem(path, f"cannot be read: {error}", advice))
        return None


def _dequeued(raw_dequeued: bytes | None) -> dict[int, str]:
    try:
        return {} if raw_dequeued is None else read_dequeued_log(raw_dequeued)
    except SerializationError:
        return {}


async def _still_there(reader: QueueReader, found: list[Finding]) -> list[Finding]:
    """Drop findings that a live consumer caused: the object of a dequeued entry may be deleted."""
    if not any(finding.severity is Severity.PROBLEM for finding in found):
        return found
    try:
        queued = {location for _, location in (await reader.index()).locations()}
    except SerializationError:
        return found
    return [
        finding
        for finding in found
        if finding.severity is Severity.NOTE
        or finding.subject in queued
        or finding.subject.endswith(_SIDE_SUFFIXES)
    ]


async def _check_batches(
    reader: QueueReader, descriptors: Iterable[BatchDescriptor], on_progress: Callable[[int, int], None]
) -> list[Finding]:
    waiting = list(descriptors)
    slots = asyncio.Semaphore(PARALLEL_FETCHES)
    done = 0

    async def check(descriptor: BatchDescriptor) -> Finding | None:
        nonlocal done
        async with slots:
            finding = await _check_batch(reader, descriptor)
        done += 1
        on_progress(done, len(waiting))
        return finding

    checked = await asyncio.gather(*(check(descriptor) for descriptor in waiting))
    found = [finding for finding in checked if finding is not None]
    return await _still_there(reader, found)


async def _check_batch(reader: QueueReader, descriptor: BatchDescriptor) -> Finding | None:
    try:
        batch = await reader.fetch(descriptor)
    except BatchMissing:
        text = f"is in the queue as {descriptor.sequence}, but not in the store"
        return _problem(descriptor.location, text, _RESTORE)
    except SerializationError as error:
        text = f"is in the queue as {descriptor.sequence}, but damaged: {error.__cause__ or error}"
        return _problem(descriptor.location, text, _RESTORE)
    except BufferError as error:
        return _problem(descriptor.location, f"could not be read: {error}", "check the store, then run again")
    starts = [meta.start_index for meta in descriptor.metadata]
    if starts != sorted(starts) or (starts and starts[-1] > len(batch)):
        return _problem(
            descriptor.location,
            f"has {len(batch)} records, but its metadata starts at {starts}",
            "the records are whole; metadata of this batch cannot be assigned to them",
        )
    return None
