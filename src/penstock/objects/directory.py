"""A directory as an object store: the blocking core.

Every object is a plain file at its key, and its version is the hash of its bytes. The folder `.penstock/`
beside the objects contains 64 lock files, among which the keys are distributed by hash, and the staged files.

A conditional write holds the lock of its key throughout: read and compare, stage, datasync, rename, sync the
directory. A plain write stages first and holds the lock only for the rename. A lock that is not released in
time raises `LockHeld`, which names the holder. Nothing was written then, and the caller may try again.

Reads sync the directory too, because a rename is visible before it is durable. Without that sync,

1. a producer renames a manifest with entry 7 into place and dies before its directory sync;
2. a consumer reads entry 7, applies it and remembers the sequence 7;
3. the power goes, and the old manifest is back: there is no entry 7;
4. the next producer appends another entry 7, which the consumer regards as done: a record is lost.

With the sync, data that was read survives any power failure. Syncing a clean directory costs almost nothing.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from typing import Final

import xxhash

from penstock.clock import Clock
from penstock.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    Unavailable,
)
from penstock.objects.keys import check_prefix, normalise_key
from penstock.objects.store import Blob, ByteRange, Data, ObjectInfo, Version, flat_views, lazy_views
from penstock.storage import FileSystem, publish, stage

SIDE_DIRECTORY: Final = ".penstock"
_STRIPES: Final = 64
_STALE_MS: Final = 3_600_000
LOCK_WAIT_S: Final = 5.0
"""How long a write waits for the lock of its key. A holder needs milliseconds, unless it is stopped."""
POOLED_BYTES_MIN: Final = 256 << 10
"""The size from which an object is read into Arrow's memory. For smaller ones the cost exceeds the gain."""


class ObjectDirectory:
    """The calls of `ObjectStore`, blocking. Safe across threads, processes and a kill at any instant."""

    def __init__(self, root: str, *, fs: FileSystem, clock: Clock, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._root = os.path.abspath(root)
        self._lock_wait_s = lock_wait_s
        self._fs = fs
        self._clock = clock
        self._locks = os.path.join(self._root, SIDE_DIRECTORY, "locks")
        self._staging = os.path.join(self._root, SIDE_DIRECTORY, "staging")
        self._prepared = False
        self._settled: set[str] = set()

    @property
    def url(self) -> str:
        """The root as a `file://` URL."""
        return f"file://{self._root}"

    def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        """See `ObjectStore.get`."""
        key = _own_key(key)
        if byte_range is not None:
            part = self._read(key, byte_range.start, byte_range.length)
            return Blob(data=part, version=None)
        data = self._read(key)
        return Blob(data=data, version=_version(data))

    def get_if_changed(self, key: str, version: Version) -> Blob | None:
        """See `ObjectStore.get_if_changed`."""
        blob = self.get(key)
        return None if blob.version == version else blob

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        key = _own_key(key)
        data = self._read(key)
        with self._absent_as_not_found(key):
            stat = self._fs.stat(self._path(key))
        return ObjectInfo(key=key, size=len(data), modified_ms=stat.modified_ms, version=_version(data))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `ObjectStore.list`. Files whose names are not valid keys are skipped."""
        folder = check_prefix(prefix)
        start = f"{folder}/" if folder else ""
        return [
            ObjectInfo(key=start + name, size=stat.size, modified_ms=stat.modified_ms)
            for name, stat in self._fs.list_files(os.path.join(self._root, folder) if folder else self._root)
            if _is_own_key(start + name)
        ]

    def put(self, key: str, data: Data) -> Version:
        """See `ObjectStore.put`."""
        key, views = _own_key(key), _Hashed(lazy_views(data))
        with self._writing(key):
            self._make_folder(key)
            with self._staged(views) as staged, self._lock(key):
                try:
                    publish(self._fs, staged, self._path(key))
                except OutcomeUnknown as error:
                    raise Unavailable(f"{error}; storing it again is safe") from error
        return views.version

    def put_if_absent(self, key: str, data: Data) -> Version:
        """See `ObjectStore.put_if_absent`."""
        key, views = _own_key(key), flat_views(data)
        with self._writing(key):
            self._make_folder(key)
            with self._lock(key):
                if self._current(key) is not None:
                    self._settle(os.path.dirname(self._path(key)))
                    raise Conflict(f"{key} already exists in {self.url}", definite=True)
                return self._replace(key, views)

    def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        """See `ObjectStore.put_if_match`."""
        key, views = _own_key(key), flat_views(data)
        with self._writing(key), self._lock(key):
            current = self._current(key)
            if current is None:
                raise Conflict(f"{key} no longer exists in {self.url}", definite=True)
            if current != version:
                raise Conflict(f"{key} in {self.url} changed since it was read", definite=True)
            self._settle_names(os.path.dirname(self._path(key)))
            return self._replace(key, views)

    def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        """See `ObjectStore.delete_many`. Empty folders stay."""
        failed: dict[str, PenstockError] = {}
        touched: dict[str, list[str]] = {}
        for key in keys:
            try:
                folder = self._delete(_own_key(key))
            except PenstockError as error:
                failed[key] = error
            else:
                if folder is not None:
                    touched.setdefault(folder, []).append(key)
        for folder, deleted in touched.items():
            try:
                self._fs.sync_dir(folder)
            except PenstockError as error:
                failed.update(dict.fromkeys(deleted, error))
        return failed

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _read(self, key: str, start: int | None = 0, length: int | None = None) -> memoryview:
        path = self._path(key)
        with self._absent_as_not_found(key):
            data = self._fs.read_into(path, start, length, _memory)
        self._settle(os.path.dirname(path))
        return data.toreadonly()

    @contextlib.contextmanager
    def _absent_as_not_found(self, key: str) -> Iterator[None]:
        """Raise `NotFound` for a missing file, for a folder at the key, and for an object above the key."""
        try:
            yield
        except (NotFound, InvalidInput) as error:
            raise NotFound(f"{key} does not exist in {self.url}") from error

    def _current(self, key: str) -> Version | None:
        try:
            return _version(self._fs.read(self._path(key)))
        except NotFound:
            return None

    def _replace(self, key: str, views: Iterable[memoryview]) -> Version:
        hashed = _Hashed(views)
        with self._staged(hashed) as staged:
            publish(self._fs, staged, self._path(key))
        return hashed.version

    def _delete(self, key: str) -> str | None:
        path = self._path(key)
        with self._writing(key), self._lock(key):
            try:
                self._fs.unlink(path)
            except (NotFound, InvalidInput):
                return None
        return os.path.dirname(path)

    def _lock(self, key: str) -> contextlib.AbstractContextManager[None]:
        stripe = xxhash.xxh3_64_intdigest(key.encode()) % _STRIPES
        path = os.path.join(self._locks, f"{stripe:02x}")
        return self._fs.lock(path, wait_s=self._lock_wait_s, note=b"%d\n" % os.getpid())

    @contextlib.contextmanager
    def _staged(self, views: Iterable[memoryview]) -> Iterator[str]:
        """Create a durable staging file. After an error, remove it unless the body may have moved it."""
        path = os.path.join(self._staging, uuid.uuid4().hex)
        stage(self._fs, path, views)
        try:
            yield path
        except OutcomeUnknown:
            raise
        except Exception:
            with contextlib.suppress(PenstockError):
                self._fs.unlink(path)
            raise

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        """Create the side directory for a write. Raise errors that name the key."""
        try:
            self._prepare()
            yield
        except NotFound as error:
            # Another process removed a folder or a staging file. Nothing was applied; a retry creates it.
            self._prepared = False
            self._settled.clear()
            raise Unavailable(f"{key} was not stored in {self.url}: {error}; try again") from error
        except InvalidInput as error:
            raise InvalidInput(
                f"{key} cannot be stored in {self.url}: it is the folder of another object, "
                f"or another object is where its folder should be, or a name in it is too long ({error})"
            ) from error

    def _prepare(self) -> None:
        if self._prepared:
            return
        self._fs.make_dirs(self._locks)
        self._fs.make_dirs(self._staging)
        self._sweep()
        self._prepared = True

    def _sweep(self) -> None:
        """Remove the staging files of killed writers. If a writer still runs, its rename fails cleanly."""
        horizon_ms = self._clock.now_ms() - _STALE_MS
        for name, stat in self._fs.list_files(self._staging):
            if stat.modified_ms < horizon_ms:
                with contextlib.suppress(PenstockError):
                    self._fs.unlink(os.path.join(self._staging, name))

    def _make_folder(self, key: str) -> None:
        folder = os.path.dirname(self._path(key))
        self._fs.make_dirs(folder)
        self._settle_names(folder)

    def _settle(self, folder: str) -> None:
        """Make every name in `folder` durable, and the path to `folder`."""
        self._settle_names(folder)
        self._fs.sync_dir(folder)

    def _settle_names(self, folder: str) -> None:
        """Make the path to `folder` durable, once per process.

        The process that created one of these directories, even above the root, may have died before its name
        was durable.
        """
        if folder in self._settled:
            return
        parent = os.path.dirname(folder)
        if parent != folder:
            self._settle_names(parent)
            inside = folder.startswith(f"{self._root}{os.sep}")
            # Directories above the root may be inaccessible; then this process did not create the root.
            with contextlib.nullcontext() if inside else contextlib.suppress(PermissionDenied):
                self._fs.sync_dir(parent)
        self._settled.add(folder)


def _own_key(key: str) -> str:
    key = normalise_key(key)
    if key.startswith(SIDE_DIRECTORY):
        raise InvalidInput(
            f"object key {key!r} starts with {SIDE_DIRECTORY!r}, which is reserved for the store"
        )
    return key


def _is_own_key(key: str) -> bool:
    try:
        return _own_key(key) == key
    except PenstockError:
        return False


class _Hashed:
    """Buffers that are hashed while they are written."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = views
        self._digest = xxhash.xxh3_128()

    def __iter__(self) -> Iterator[memoryview]:
        for view in self._views:
            self._digest.update(view)
            yield view

    @property
    def version(self) -> Version:
        return Version(etag=self._digest.hexdigest())


def _memory(size: int) -> memoryview:
    """Allocate the memory for an object. Large blocks come from Arrow's pool, which reuses freed blocks.

    The C library would allocate each block from the system again, and the page faults cost more than reading
    the object.
    """
    if size < POOLED_BYTES_MIN:
        return memoryview(bytearray(size))
    import pyarrow as pa

    return memoryview(pa.allocate_buffer(size)).cast("B")


def _version(data: bytes | memoryview) -> Version:
    return Version(etag=xxhash.xxh3_128_hexdigest(data))
