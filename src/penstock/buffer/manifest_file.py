"""The manifest as a stored object: read with its version, replaced only if that version is still current."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.buffer import manifest
from penstock.buffer.batch import batch_minted_ms, is_own
from penstock.buffer.errors import SerializationError
from penstock.buffer.manifest import EMPTY_MANIFEST, Footer
from penstock.buffer.side_objects import read_dequeued_log
from penstock.errors import NotFound
from penstock.limits import MANIFEST_BYTES_MAX
from penstock.objects import Blob, BucketNotFound, ObjectStore, Version

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The manifest at one moment. `version` is None while the object does not exist."""

    raw: bytes
    version: Version | None

    @property
    def footer(self) -> Footer:
        return manifest.read_footer(self.raw)


class ManifestFile:
    """The manifest object of a queue, and the names of its side objects.

    A client that writes passes the folder of the batches as `prefix`, so that a lost manifest is not mistaken
    for a new queue. With `checks_dequeued`, meant for long-lived clients, the first read also reads the
    dequeued log.
    """

    __slots__ = (
        "_checks_dequeued",
        "_is_reported",
        "_prefix",
        "_seen",
        "_since_ms",
        "dequeued_path",
        "floor_path",
        "path",
        "store",
        "transactions_path",
    )

    def __init__(
        self,
        store: ObjectStore,
        path: str,
        *,
        prefix: str | None = None,
        since_ms: int = 0,
        checks_dequeued: bool = False,
    ) -> None:
        """Create the file. Batches named before `since_ms` were not created by this client."""
        self.store = store
        self._prefix = prefix
        self._since_ms = since_ms
        self._checks_dequeued = checks_dequeued
        self._is_reported = False
        self._seen: Footer | None = None
        self.path = path
        self.dequeued_path = f"{path}.ledger"
        self.floor_path = f"{path}.floor"
        self.transactions_path = f"{path}.txn"

    async def read(self) -> Snapshot:
        """Read the manifest. An absent object is an empty queue.

        A manifest without a readable footer is read once more: the response may have been truncated. The
        first read raises `SerializationError` if the dequeued log proves that the manifest is an older copy.
        """
        # The log is read first: a dequeue in between only makes the manifest newer.
        raw_dequeued = (await self.read_side(self.dequeued_path))[0] if self._checks_dequeued else None
        snapshot = await self._read()
        try:
            manifest.read_footer(snapshot.raw)
        except SerializationError:
            snapshot = await self._read()
        if raw_dequeued is not None and snapshot.version is not None:
            _check_against_dequeued_log(self.path, snapshot.raw, raw_dequeued)
        self._checks_dequeued = False
        return snapshot

    async def _read(self) -> Snapshot:
        try:
            blob = await self.store.get(self.path)
        except BucketNotFound:
            raise
        except NotFound:
            return await self._absent()
        return self._noted(_checked(blob))

    def _noted(self, snapshot: Snapshot) -> Snapshot:
        with contextlib.suppress(SerializationError):
            self._seen = snapshot.footer
        return snapshot

    async def _absent(self) -> Snapshot:
        """Return an empty queue. If a manifest was lost, numbers and epochs continue above those it assigned.

        A manifest is known to be lost if there is a dequeued log or this client saw the manifest. Each number
        belongs to a batch that is in that log or whose object is still in the folder: an entry leaves the
        queue after it was written to the log, and its object is deleted after that. Batches without a
        dequeued log are only reported, because a queue whose first producers were killed looks the same.
        """
        if self._prefix is None:
            return Snapshot(raw=EMPTY_MANIFEST, version=None)
        raw, _ = await self.read_side(self.dequeued_path)
        known, ended = _known(raw)
        kept = set(known.values())
        stored = [
            info.key
            for info in await self.store.list(self._prefix)
            if is_own(info.key, self._prefix) and info.key not in kept
        ]
        times = [batch_minted_ms(key) for key in stored]
        earlier = sum(ms is not None and ms < self._since_ms for ms in times)
        ended = ended if self._seen is None else _later(ended, self._seen)
        first = ended.next_sequence and ended.next_sequence + len(stored)
        if (first or earlier) and not self._is_reported:
            self._is_reported = True
            _log.warning(
                "%s does not exist, but %d earlier batches are in %s/, and numbers up to %d are known to be "
                "assigned. If the manifest was lost, stop and restore it: these batches are not in the "
                "queue. Without it, the next batch gets number %d",
                self.path,
                earlier,
                self._prefix,
                ended.next_sequence - 1,
                first,
            )
        return Snapshot(
            raw=Footer(entry_count=0, next_sequence=first, epoch=ended.epoch).pack(), version=None
        )

    async def reread(self, known: Snapshot) -> Snapshot:
        """Read the manifest. While it is still `known`, this costs only a "not modified" response."""
        if known.version is None:
            return await self.read()
        try:
            blob = await self.store.get_if_changed(self.path, known.version)
        except BucketNotFound:
            raise
        except NotFound:
            return await self._absent()
        if blob is None:
            return known
        snapshot = self._noted(_checked(blob))
        try:
            manifest.read_footer(snapshot.raw)
        except SerializationError:
            return await self._read()
        return snapshot

    async def write(self, raw: bytes, base: Snapshot) -> Snapshot:
        """Replace `base`. Raise the store's `Conflict` or `OutcomeUnknown`."""
        if base.version is None:
            version = await self.store.put_if_absent(self.path, raw)
        else:
            version = await self.store.put_if_match(self.path, raw, base.version)
        return self._noted(Snapshot(raw=raw, version=version))

    async def write_side(self, path: str, raw: bytes, base: Version | None) -> Version:
        """Replace a side object of version `base` (None: absent). Raise the same errors as `write`."""
        if base is None:
            return await self.store.put_if_absent(path, raw)
        return await self.store.put_if_match(path, raw, base)

    async def read_side(self, path: str) -> tuple[bytes | None, Version | None]:
        """Return the bytes and version of a side object, or (None, None) if it is absent."""
        try:
            blob = await self.store.get(path)
        except NotFound:
            return None, None
        return bytes(blob.data), blob.version


def _checked(blob: Blob) -> Snapshot:
    if len(blob.data) > MANIFEST_BYTES_MAX:
        raise SerializationError(
            f"manifest of {len(blob.data)} bytes is above the cap of {MANIFEST_BYTES_MAX}"
        )
    return Snapshot(raw=bytes(blob.data), version=blob.version)


def _known(raw_dequeued: bytes | None) -> tuple[Mapping[int, str], Footer]:
    """Decode the entries and the footer of a dequeued log. A damaged log counts as empty."""
    if raw_dequeued is not None:
        try:
            return read_dequeued_log(raw_dequeued), manifest.read_footer(raw_dequeued)
        except SerializationError:
            pass
    return {}, Footer(entry_count=0, next_sequence=0, epoch=0)


def _check_against_dequeued_log(path: str, raw: bytes, raw_dequeued: bytes) -> None:
    """Raise `SerializationError` for a manifest that is older than its dequeued log.

    A consumer whose epoch is in the manifest writes an entry to the dequeued log before the entry leaves the
    queue. A manifest was therefore replaced by an older copy if it has not assigned a number of that log, has
    another batch under that number, or has an epoch below that of the log.
    """
    known, ended = _known(raw_dequeued)
    footer = manifest.read_footer(raw)
    here = dict(manifest.index(raw).locations())
    other = next((seq for seq, location in here.items() if known.get(seq, location) != location), None)
    if known and ended.next_sequence > footer.next_sequence:
        why = f"batch {ended.next_sequence - 1} was consumed, but its next number is {footer.next_sequence}"
    elif other is not None:
        why = f"batch {other} was consumed from another location"
    elif known and 0 < ended.epoch - footer.epoch < 2**63:
        why = f"a consumer of epoch {ended.epoch} has written, but its epoch is {footer.epoch}"
    else:
        return
    raise SerializationError(
        f"{path} is older than its ledger {path}.ledger: {why}. Restore the newest manifest. If there is "
        "none, keep a copy and remove this one: numbers then continue after those that were assigned"
    )


def _later(one: Footer, other: Footer) -> Footer:
    return Footer(
        entry_count=0,
        next_sequence=max(one.next_sequence, other.next_sequence),
        epoch=max(one.epoch, other.epoch),
    )
