"""The storage interface over SlateDB, which keeps all data in an object store.

    storage = await SlateStorage.open(SlateStore("s3://bucket"), "metrics", merge=add)

"Persisted" means that the object store has accepted the write-ahead log. A local directory (`file:///`)
survives a killed process but not a power failure, because SlateDB does not sync files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

from penstock.blocking import NativeRuntime
from penstock.coordinator.slate_batch import SlateBatch, slatedb
from penstock.coordinator.storage import KeyValue, MergeOperator, Operation
from penstock.errors import (
    ConfigError,
    Corrupt,
    Fenced,
    InvalidInput,
    OutcomeUnknown,
    PenstockError,
    Unavailable,
)
from penstock.storage import OsFileSystem

__all__ = ["OPEN_TIMEOUT_S", "SlateSnapshot", "SlateStorage", "SlateStore"]

_LOG = logging.getLogger(__name__)
_RUNTIME = NativeRuntime("SlateDB")
_PAGE = 1000
OPEN_TIMEOUT_S: Final = 60.0
"""Time limit for opening a database. SlateDB itself retries an unresponsive store indefinitely. Reading
the log after a crash takes seconds."""
_CLOSE_TIMEOUT_S: Final = 5.0
_TURN_S = 15e-6
"""Longest time to build a batch without yielding to the event loop, so that other tasks can run. Adding an
operation takes about 5 us, and a turn of the loop 2 us."""


class SlateStore:
    """A location for databases: `file:///dir`, `s3://bucket/dir`, `az://`, `gs://`, or `memory:///` (in
    this object)."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        """Connect to `url`. `options` are those of the store's client, such as `aws_endpoint`. Raises
        `ConfigError`."""
        root, self.directory = _split(url)
        self.url = _shown(url)
        """The URL for messages, without the parts that may contain a secret."""
        binding = slatedb()
        try:
            builder = binding.ObjectStoreBuilder.from_url(root)
            for name, value in (options or {}).items():
                builder.with_config(name, value)
            # Without options, `resolve` also reads the environment, as the cloud providers' tools do.
            self.handle: Any = builder.build() if options else binding.ObjectStore.resolve(root)
        except binding.Error as error:
            raise ConfigError(f"{self.url}: {_message_of(error)}") from error

    def path(self, name: str) -> str:
        """Return the path of the database `name` below the root of the store."""
        return "/".join(part for part in (self.directory, name.strip("/")) if part)


def _split(url: str) -> tuple[str, str]:
    """Return the root that SlateDB resolves, and the directory below it, which is a prefix of database
    paths."""
    parts = urlsplit(url)
    if not parts.scheme or (parts.scheme not in ("file", "memory") and not parts.netloc):
        raise ConfigError(f"{url!r} is not the url of a store, such as s3://bucket or file:///directory")
    return f"{parts.scheme}://{parts.netloc}{'' if parts.netloc else '/'}", parts.path.strip("/")


def _shown(url: str) -> str:
    """Return the URL without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class _Reader:
    """Reads from a database or a snapshot."""

    def __init__(self, source: Any) -> None:
        self._source = source

    async def get(self, key: bytes) -> bytes | None:
        """See `StorageRead.get`."""
        with _translated_errors("reading", write=False):
            value: bytes | None = await self._source.get(key)
        return value

    async def scan(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        """See `StorageRead.scan`."""
        if stop is not None and stop <= start:
            return
        span = slatedb().KeyRange(start=start or None, start_inclusive=True, end=stop, end_inclusive=False)
        with _translated_errors("scanning", write=False):
            iterator = await self._source.scan_prefix(prefix, span)
        while True:
            with _translated_errors("scanning", write=False):
                page = await iterator.next_batch(_PAGE)
            if page:
                yield [KeyValue(row.key, row.value) for row in page]
            if len(page) < _PAGE:
                return


class SlateSnapshot(_Reader):
    """A database at one instant."""


class SlateStorage(_Reader):
    """A SlateDB database with this process as its writer."""

    def __init__(self, database: Any, *, persist_at_once: bool = False) -> None:
        super().__init__(database)
        self._newest: Any = None
        self._persist_at_once = persist_at_once
        self._persisting: tuple[Any, asyncio.Task[None]] | None = None
        """A write whose sync started before `flush` was called, and the task of that sync."""
        self._closed = False

    @classmethod
    async def open(
        cls,
        store: SlateStore | str,
        name: str,
        *,
        merge: MergeOperator | None = None,
        settings: Mapping[str, object] | None = None,
        persist_at_once: bool = False,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> SlateStorage:
        """Open or create the database `name`, and fence its previous writer.

        `settings` are SlateDB's own, by dotted name. `persist_at_once` is for callers that `flush` after
        every `apply`: the sync starts right after the write, in parallel with other work such as a snapshot.
        Raises `ConfigError`, `Corrupt`, and `Unavailable` if the database is not open after `open_timeout_s`
        seconds, or if this process was forked from one that had opened a database. A database that opens
        after the timeout or after a cancellation is closed again.
        """
        _RUNTIME.use(f"the database {name!r}")
        store = SlateStore(store) if isinstance(store, str) else store
        if store.url.startswith("file:"):
            # SlateDB creates its files with the process's umask, so the parent directory restricts access.
            OsFileSystem().make_dirs(f"/{store.path(name)}")
        binding = slatedb()
        builder = binding.DbBuilder(store.path(name), store.handle)
        try:
            builder.with_settings(_settings(settings or {}))
            if merge is not None:
                builder.with_merge_operator(_operator(merge))
        except binding.Error as error:
            raise ConfigError(f"SlateDB: {_message_of(error)}") from error
        with _translated_errors(f"opening {name!r}", write=False):
            database = await _opened(builder, f"{store.url}: the database {name!r}", open_timeout_s)
        storage = cls(database, persist_at_once=persist_at_once)
        try:
            await asyncio.wait_for(_first_read(storage), open_timeout_s)
        except BaseException as error:
            with suppress(PenstockError, TimeoutError):
                await asyncio.wait_for(storage.close(), _CLOSE_TIMEOUT_S)
            if isinstance(error, TimeoutError):
                raise Unavailable(
                    f"{store.url}: the database {name!r} did not answer its first read within "
                    f"{open_timeout_s:g} s. Either the store does not answer, or a file below "
                    f"{name}/compacted has no bytes: SlateDB waits for those without end. Restore that file"
                ) from error
            raise
        return storage

    async def apply(self, operations: Iterable[Operation]) -> None:
        """See `Storage.apply`."""
        batch = SlateBatch()
        with _translated_errors("building a batch", write=False):
            began = time.perf_counter()
            for operation in operations:
                batch.add(operation)
                if time.perf_counter() - began > _TURN_S:
                    await asyncio.sleep(0)
                    began = time.perf_counter()
        if not batch.count:
            return
        with _translated_errors("writing a batch", write=True):
            self._newest = await self._source.write(batch.handle)
        if self._persist_at_once and (self._persisting is None or self._persisting[1].done()):
            task = asyncio.get_running_loop().create_task(self._persist(self._newest))
            task.add_done_callback(_seen)
            self._persisting = self._newest, task

    async def snapshot(self) -> SlateSnapshot:
        """See `Storage.snapshot`."""
        with _translated_errors("making a snapshot", write=False):
            return SlateSnapshot(await self._source.snapshot())

    async def flush(self) -> None:
        """See `Storage.flush`."""
        newest = self._newest
        if newest is None:
            return
        if self._persisting is not None and self._persisting[0] is newest:
            await asyncio.shield(self._persisting[1])
        else:
            await self._persist(newest)

    async def _persist(self, newest: Any) -> None:
        """Wait until `newest` and everything written before it is durable."""
        binding = slatedb()
        with _translated_errors("persisting", write=True):
            # Flush the log instead of waiting for its next tick. Only the handle confirms durability.
            await self._source.flush_with_options(binding.FlushOptions(flush_type=binding.FlushType.WAL))
            await newest.await_durable()

    async def __aenter__(self) -> SlateStorage:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See `Storage.close`."""
        if self._closed:
            return
        self._closed = True
        binding = slatedb()
        with _translated_errors("closing", write=True):
            try:
                await self._source.shutdown()
            except binding.Error.Closed as error:
                # A fenced database closes itself, possibly before this call. Callers of `flush` have already
                # got the error.
                if error.reason not in (binding.CloseReason.FENCED, binding.CloseReason.CLEAN):
                    raise
            finally:
                if self._persisting is not None:
                    self._persisting[1].cancel()


async def _first_read(storage: SlateStorage) -> None:
    """Read the first row. This makes SlateDB open every file that is not compacted yet."""
    async for _ in storage.scan(b""):
        return


async def _opened(builder: Any, what: str, timeout_s: float) -> Any:
    """Return the opened database. Raises `Unavailable` after `timeout_s`."""
    opening: asyncio.Task[Any] = asyncio.get_running_loop().create_task(builder.build())
    waiting = True
    try:
        # Do not cancel it: SlateDB might leave tasks running that nothing could stop.
        await asyncio.wait({opening}, timeout=timeout_s)
        if opening.done():
            waiting = False
            return opening.result()
    finally:
        if waiting:
            _close_later(opening)
    raise Unavailable(
        f"{what} did not open within {timeout_s:g} s: the store does not answer. Check its address, the "
        "endpoint, the credentials and the network"
    )


_LATE: Final[set[asyncio.Task[None]]] = set()
"""Tasks of abandoned opens. The loop itself holds only weak references to tasks."""


def _close_later(opening: asyncio.Task[Any]) -> None:
    """Close the database if `opening` still succeeds."""

    async def close() -> None:
        try:
            database = await opening
            _LOG.warning("a database opened after its timeout; it is closed again")
            await database.shutdown()
        except Exception as error:  # noqa: BLE001 - the caller already got an error
            _LOG.debug("an abandoned open failed: %s", error)

    task = asyncio.get_running_loop().create_task(close())
    _LATE.add(task)
    task.add_done_callback(_LATE.discard)


def _seen(task: asyncio.Task[None]) -> None:
    """Mark the exception of a failed sync as retrieved: the next `flush` raises it."""
    if not task.cancelled():
        task.exception()


def _settings(settings: Mapping[str, object]) -> Any:
    made = slatedb().Settings.default()
    for name, value in settings.items():
        made.set(name, json.dumps(value))
    return made


def _operator(merge: MergeOperator) -> Any:
    class Operator(slatedb().MergeOperator):  # type: ignore[misc]
        def merge(self, key: bytes, existing_value: bytes | None, operand: bytes) -> bytes:
            return operand if existing_value is None else merge(key, (existing_value, operand))

    return Operator()


@contextmanager
def _translated_errors(doing: str, *, write: bool) -> Iterator[None]:
    """Translate SlateDB's errors into Penstock's."""
    binding = slatedb()
    try:
        yield
    except (binding.Error, binding.InternalError) as error:
        raise _translated(error, doing, write) from error


def _translated(error: Exception, doing: str, write: bool) -> PenstockError:
    binding = slatedb()
    text = f"SlateDB, {doing}: {_message_of(error)}"
    if isinstance(error, binding.Error.Closed):
        if error.reason is binding.CloseReason.FENCED:
            return Fenced(text)
        if error.reason is not binding.CloseReason.CLEAN:
            # This applies to reads as well: every later call fails, and the last writes may not be stored.
            return OutcomeUnknown(f"{text}. The database has stopped permanently: open it again")
    if isinstance(error, binding.Error.Invalid):
        return InvalidInput(text)
    if isinstance(error, binding.Error.Data):
        return Corrupt(text)
    return OutcomeUnknown(text) if write else Unavailable(text)


def _message_of(error: Exception) -> str:
    return str(getattr(error, "message", None) or error)
