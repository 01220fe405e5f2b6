"""An object store in memory: exact, immediate and deterministic. Its content ends with the process."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Conflict, NotFound, PenstockError
from penstock.objects.keys import check_prefix, normalise_key
from penstock.objects.store import Blob, ByteRange, Data, ObjectInfo, Version, flat_views


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    data: bytes
    version: Version
    modified_ms: int


class MemoryStore:
    """An `ObjectStore` that keeps copies in a dictionary.

    No call yields to the event loop, so a simulation with it is repeatable. Threads may share it. Every write
    creates a new version, even of equal bytes.
    """

    def __init__(self, name: str = "", *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._name = name
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._writes = 0
        self._mutex = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        entry = self._entry(normalise_key(key))
        view = memoryview(entry.data)
        if byte_range is None:
            return Blob(data=view, version=entry.version)
        start = max(0, len(view) - byte_range.length) if byte_range.start is None else byte_range.start
        return Blob(data=view[start : start + byte_range.length], version=None)

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        entry = self._entry(normalise_key(key))
        return None if entry.version == version else Blob(data=memoryview(entry.data), version=entry.version)

    async def put(self, key: str, data: Data) -> Version:
        key = normalise_key(key)
        with self._mutex:
            return self._write(key, data)

    async def put_if_absent(self, key: str, data: Data) -> Version:
        key = normalise_key(key)
        with self._mutex:
            if key in self._entries:
                raise Conflict(f"{key} already exists in {self.url}", definite=True)
            return self._write(key, data)

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        key = normalise_key(key)
        with self._mutex:
            entry = self._entries.get(key)
            if entry is None or entry.version != version:
                raise Conflict(
                    f"{key} in {self.url} changed since it was read"
                    if entry
                    else f"{key} no longer exists in {self.url}",
                    definite=True,
                )
            return self._write(key, data)

    async def head(self, key: str) -> ObjectInfo:
        key = normalise_key(key)
        return _info(key, self._entry(key))

    async def list(self, prefix: str) -> list[ObjectInfo]:
        folder = check_prefix(prefix)
        start = f"{folder}/" if folder else ""
        with self._mutex:
            found = [(key, entry) for key, entry in self._entries.items() if key.startswith(start)]
        return [_info(key, entry) for key, entry in sorted(found, key=lambda item: item[0])]

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        failed: dict[str, PenstockError] = {}
        for key in keys:
            try:
                with self._mutex:
                    self._entries.pop(normalise_key(key), None)
            except PenstockError as error:
                failed[key] = error
        return failed

    async def close(self) -> None:
        """Do nothing: the objects stay, because other users may share this store."""

    def _entry(self, key: str) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise NotFound(f"{key} does not exist in {self.url}")
        return entry

    def _write(self, key: str, data: Data) -> Version:
        copied = b"".join(flat_views(data))
        self._writes += 1
        version = Version(etag=f'"{self._writes}"', generation=str(self._writes))
        self._entries[key] = _Entry(data=copied, version=version, modified_ms=self._clock.now_ms())
        return version


_NAMED: dict[str, MemoryStore] = {}
_NAMED_MUTEX = threading.Lock()


def named_memory_store(name: str) -> MemoryStore:
    """Return the process's only store of this name, so that `memory://x` means the same everywhere."""
    with _NAMED_MUTEX:
        return _NAMED.setdefault(name, MemoryStore(name))


def _info(key: str, entry: _Entry) -> ObjectInfo:
    return ObjectInfo(key=key, size=len(entry.data), modified_ms=entry.modified_ms, version=entry.version)
