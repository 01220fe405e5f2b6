"""The manifest as an object in a store: read with its version, replaced only from a known version."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.buffer import manifest
from penstock.buffer.errors import SerializationError
from penstock.buffer.manifest import EMPTY_MANIFEST, Footer
from penstock.errors import NotFound
from penstock.limits import MANIFEST_BYTES_MAX
from penstock.objects import Blob, BucketNotFound, ObjectStore, Version

__all__ = ["ManifestFile", "Snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The manifest at one moment. `version` is None while the object does not exist."""

    raw: bytes
    version: Version | None

    @property
    def footer(self) -> Footer:
        return manifest.read_footer(self.raw)


class ManifestFile:
    """One queue's manifest object and the names of the side objects beside it."""

    __slots__ = ("book_path", "floor_path", "ledger_path", "path", "store")

    def __init__(self, store: ObjectStore, path: str) -> None:
        self.store = store
        self.path = path
        self.ledger_path = f"{path}.ledger"
        self.floor_path = f"{path}.floor"
        self.book_path = f"{path}.txn"

    async def read(self) -> Snapshot:
        """The manifest now; an absent object is an empty queue.

        One without a readable footer is read once more: the bytes may have been cut short on the way.
        """
        snapshot = await self._read()
        try:
            manifest.read_footer(snapshot.raw)
        except SerializationError:
            return await self._read()
        return snapshot

    async def _read(self) -> Snapshot:
        try:
            blob = await self.store.get(self.path)
        except BucketNotFound:
            raise
        except NotFound:
            return Snapshot(raw=EMPTY_MANIFEST, version=None)
        return _checked(blob)

    async def reread(self, known: Snapshot) -> Snapshot:
        """The manifest now, at the cost of a "not modified" while it is still `known`."""
        if known.version is None:
            return await self.read()
        try:
            blob = await self.store.get_if_changed(self.path, known.version)
        except BucketNotFound:
            raise
        except NotFound:
            return Snapshot(raw=EMPTY_MANIFEST, version=None)
        if blob is None:
            return known
        snapshot = _checked(blob)
        try:
            manifest.read_footer(snapshot.raw)
        except SerializationError:
            return await self._read()
        return snapshot

    async def write(self, raw: bytes, base: Snapshot) -> Snapshot:
        """Replace `base`. Raises `Conflict` or `OutcomeUnknown` as the store does."""
        if base.version is None:
            version = await self.store.put_if_absent(self.path, raw)
        else:
            version = await self.store.put_if_match(self.path, raw, base.version)
        return Snapshot(raw=raw, version=version)

    async def write_side(self, path: str, raw: bytes, base: Version | None) -> Version:
        """Replace a side object that was in version `base` (None: absent). Raises as `write` does."""
        if base is None:
            return await self.store.put_if_absent(path, raw)
        return await self.store.put_if_match(path, raw, base)

    async def read_side(self, path: str) -> tuple[bytes | None, Version | None]:
        """A side object, or (None, None) while it does not exist."""
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
