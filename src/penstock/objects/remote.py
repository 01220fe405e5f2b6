"""Object stores over the network: S3, Azure Blob Storage and Google Cloud Storage.

Each store has two handles. The data handle retries failed requests. The handle for conditional writes does
not: if the first attempt was stored and its response lost, a retry would be refused, and the client's own
write would look like that of another client.

Calls block in threads. That is several times cheaper than the coroutines of the client library, which can
also abort the interpreter at exit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from penstock.blocking import NativeRuntime
from penstock.errors import ConfigError, InvalidInput, NotFound, PenstockError, PermissionDenied, Unavailable
from penstock.objects.errors import (
    BucketNotFound,
    FailedRequest,
    Fault,
    is_beyond_end,
    is_not_modified,
    is_not_partial,
    read_fault,
    translate,
)
from penstock.objects.keys import check_prefix, normalise_key
from penstock.objects.local import Workers
from penstock.objects.settings import REMOTE_SCHEMES, StoreAddress, StoreConfig
from penstock.objects.store import Blob, ByteRange, Data, ObjectInfo, Version, flat_views

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult
    from obstore.store import ClientConfig, RetryConfig


_MULTIPART_BYTES: Final = 32 * 1024 * 1024
_PART_BYTES: Final = 8 * 1024 * 1024
_DELETE_MANY: Final = 1000
_TAIL_ATTEMPTS: Final = 5
_Infos: TypeAlias = list[ObjectInfo]
_FAILURES: Final = (BaseError, OSError, NotImplementedError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handles:
    data: S3Store | AzureStore | GCSStore
    conditional: S3Store | AzureStore | GCSStore
    pid: int


_RUNTIME = NativeRuntime("an object store")


class RemoteStore:
    """An `ObjectStore` in a bucket, or in a folder of one.

    A plain write may be sent twice, and a large one in parts. A conditional write is one request. Buffers are
    not copied: do not change them before the call ends.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._address = StoreAddress.parse(config.url)
        if self._address.scheme not in REMOTE_SCHEMES:
            raise ConfigError(f"store: {config.url} is not remote; use penstock.objects.open_store")
        self._config = config
        self._workers = Workers(self._address.scheme, config.threads)
        self._open: _Handles | None = None
        self._handles()

    @property
    def url(self) -> str:
        return self._address.url

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        key = normalise_key(key)
        if byte_range is None:
            return await self._workers.run(self._get, key)
        return await self._workers.run(self._get_range, key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        return await self._workers.run(self._get_if_changed, normalise_key(key), version)

    async def put(self, key: str, data: Data) -> Version:
        return await self._workers.run(self._put, normalise_key(key), data)

    async def put_if_absent(self, key: str, data: Data) -> Version:
        return await self._workers.run(self._put_if, "create", normalise_key(key), data)

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        mode = _update_mode(version)
        return await self._workers.run(self._put_if, mode, normalise_key(key), data)

    async def head(self, key: str) -> ObjectInfo:
        return await self._workers.run(self._head, normalise_key(key))

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return await self._workers.run(self._list_below, check_prefix(prefix))

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        return await self._workers.run(self._delete_many, list(keys))

    async def copy(self, source: str, target: str) -> None:
        """Copy `source` to `target` within the store. Safe to repeat."""
        await self._workers.run(self._copy, normalise_key(source), normalise_key(target))

    async def close(self) -> None:
        self._workers.close()
        self._open = None

    def _handles(self) -> _Handles:
        handles = self._open
        if handles is None or handles.pid != os.getpid():
            handles = self._open = _open_handles(self._address, self._config)
        return handles

    def _full(self, key: str) -> str:
        return f"{self._address.path}/{key}" if self._address.path else key

    def _request(self, doing: str, key: str | None = None, *, conditional: bool = False) -> FailedRequest:
        return FailedRequest(
            doing=doing, url=self.url, bucket=self._address.bucket, key=key, conditional=conditional
        )

    @contextmanager
    def _translated(self, call: FailedRequest) -> Iterator[None]:
        _RUNTIME.use(self.url)
        try:
            yield
        except _FAILURES as error:
            # The original error is not chained: its text may hold a signed URL.
            raise translate(_fault(error), call) from None

    def _get(self, key: str) -> Blob:
        with self._translated(self._request("read", key)):
            result = obstore.get(self._handles().data, self._full(key))
            return Blob(data=memoryview(result.bytes()), version=self._version(result.meta))

    def _get_if_changed(self, key: str, version: Version) -> Blob | None:
        if version.etag is None:
            blob = self._get(key)
            return None if blob.version == version else blob
        with self._translated(self._request("read", key)):
            try:
                result = obstore.get(
                    self._handles().data, self._full(key), options={"if_none_match": version.etag}
                )
                return Blob(data=memoryview(result.bytes()), version=self._version(result.meta))
            except BaseError as error:
                if is_not_modified(_fault(error)):
                    return None
                raise

    def _get_range(self, key: str, byte_range: ByteRange) -> Blob:
        if byte_range.length < 0 or (byte_range.start is not None and byte_range.start < 0):
            raise InvalidInput(f"a byte range has no negative numbers: {byte_range}")
        if byte_range.length == 0:
            self._head(key)
            return _part(b"")
        if byte_range.start is not None:
            return self._read_span(key, byte_range.start, byte_range.length)
        if self._address.scheme == "az":
            return self._read_tail_by_head(key, byte_range.length)
        return self._read_tail(key, byte_range.length)

    def _read_span(self, key: str, start: int, length: int) -> Blob:
        with self._translated(self._request("read", key)):
            try:
                result = obstore.get(
                    self._handles().data, self._full(key), options={"range": (start, start + length)}
                )
                return _part(result.bytes())
            except BaseError as error:
                if is_beyond_end(_fault(error)):
                    return _part(b"")
                if not is_not_partial(str(error)):
                    raise
        return _part(self._get(key).data[start : start + length])

    def _read_tail(self, key: str, length: int) -> Blob:
        with self._translated(self._request("read", key)):
            try:
                result = obstore.get(
                    self._handles().data, self._full(key), options={"range": {"suffix": length}}
                )
                return _part(result.bytes())
            except BaseError as error:
                if is_beyond_end(_fault(error)):
                    return _part(b"")
                if not is_not_partial(str(error)):
                    raise
        return _part(self._get(key).data[-length:])

    def _read_tail_by_head(self, key: str, length: int) -> Blob:
        """Read a suffix by its absolute range, because Azure has no suffix ranges.

        The etag prevents a read of a replaced object with the old size.
        """
        call = self._request("read", key)
        for _ in range(_TAIL_ATTEMPTS):
            info = self._head(key)
            if info.size == 0:
                return _part(b"")
            etag = info.version.etag if info.version else None
            span = (max(0, info.size - length), info.size)
            with self._translated(call):
                try:
                    result = obstore.get(
                        self._handles().data, self._full(key), options={"range": span, "if_match": etag}
                    )
                    return _part(result.bytes())
                except BaseError as error:
                    if _fault(error).kind != "PreconditionError":
                        raise
        raise Unavailable(f"{call}: it changes faster than it can be read; try again")

    def _put(self, key: str, data: Data) -> Version:
        views = flat_views(data)
        large = sum(view.nbytes for view in views) > _MULTIPART_BYTES
        with self._translated(self._request("store", key)):
            return self._version(
                obstore.put(
                    self._handles().data,
                    self._full(key),
                    _payload(views),
                    use_multipart=large,
                    chunk_size=_PART_BYTES,
                )
            )

    def _put_if(self, mode: PutMode, key: str, data: Data) -> Version:
        views = flat_views(data)
        doing = "create" if mode == "create" else "replace"
        with self._translated(self._request(doing, key, conditional=True)):
            return self._version(
                obstore.put(
                    self._handles().conditional,
                    self._full(key),
                    _payload(views),
                    mode=mode,
                    use_multipart=False,
                )
            )

    def _head(self, key: str) -> ObjectInfo:
        with self._translated(self._request("look at", key)):
            return self._info(key, obstore.head(self._handles().data, self._full(key)))

    def _list_below(self, prefix: str) -> _Infos:
        folder = self._full(prefix).rstrip("/") if prefix or self._address.path else ""
        skip = len(self._address.path) + 1 if self._address.path else 0
        with self._translated(self._request("list")):
            chunks = obstore.list(self._handles().data, prefix=folder or None, chunk_size=1000)
            found = [self._info(meta["path"][skip:], meta) for chunk in chunks for meta in chunk]
        return sorted(found, key=lambda info: info.key)

    def _copy(self, source: str, target: str) -> None:
        with self._translated(self._request("copy", source)):
            obstore.copy(self._handles().data, self._full(source), self._full(target))

    def _delete_many(self, keys: Sequence[str]) -> dict[str, PenstockError]:
        failed: dict[str, PenstockError] = {}
        valid: list[str] = []
        for key in keys:
            try:
                valid.append(normalise_key(key))
            except PenstockError as error:
                failed[key] = error
        for start in range(0, len(valid), _DELETE_MANY):
            failed.update(self._delete_some(valid[start : start + _DELETE_MANY]))
        return failed

    def _delete_some(self, keys: Sequence[str]) -> dict[str, PenstockError]:
        """Delete all in one request. If that fails, delete them one by one to find out which fail."""
        try:
            self._delete(keys)
        except PermissionDenied as error:
            return dict.fromkeys(keys, error)
        except PenstockError:
            return self._delete_each(keys)
        return {}

    def _delete_each(self, keys: Sequence[str]) -> dict[str, PenstockError]:
        failed: dict[str, PenstockError] = {}
        for index, key in enumerate(keys):
            try:
                self._delete([key])
            except Unavailable as error:
                # The store is unavailable: each of the others would take as long to fail.
                failed.update(dict.fromkeys(keys[index:], error))
                break
            except PenstockError as error:
                if isinstance(error, BucketNotFound) or not isinstance(error, NotFound):
                    failed[key] = error
        return failed

    def _delete(self, keys: Sequence[str]) -> None:
        with self._translated(self._request("delete", keys[0] if len(keys) == 1 else None)):
            obstore.delete(self._handles().data, [self._full(key) for key in keys])

    def _info(self, key: str, meta: ObjectMeta) -> ObjectInfo:
        modified_ms = int(meta["last_modified"].timestamp() * 1000)
        return ObjectInfo(key=key, size=meta["size"], modified_ms=modified_ms, version=self._version(meta))

    def _version(self, result: ObjectMeta | PutResult) -> Version:
        # Only Google compares generations. Elsewhere calls return different values for the same state.
        generation = result["version"] if self._address.scheme == "gs" else None
        return Version(etag=result["e_tag"], generation=generation)


def _open_handles(address: StoreAddress, config: StoreConfig) -> _Handles:
    timeout = timedelta(seconds=config.request_timeout_s)
    client: ClientConfig = {"timeout": timeout}
    patient: RetryConfig = {
        "max_retries": config.retries,
        "retry_timeout": max(timeout * 2, timedelta(minutes=1)),
    }
    never: RetryConfig = {"max_retries": 0}
    options = _with_environment(address.scheme, config.options)
    make = cast("Callable[..., S3Store | AzureStore | GCSStore]", _CLASSES[address.scheme])
    try:
        data, conditional = (
            make(address.bucket, config=options, client_options=client, retry_config=retry)
            for retry in (patient, never)
        )
    except _FAILURES as error:
        raise _wrong_options(address.url, error) from None
    return _Handles(data=data, conditional=conditional, pid=os.getpid())


_CLASSES: Final[Mapping[str, type]] = {"az": AzureStore, "gs": GCSStore, "s3": S3Store}
_ALLOW_HTTP: Final = {"az": "AZURE_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "s3": "AWS_ALLOW_HTTP"}


def _with_environment(scheme: str, options: Mapping[str, str]) -> dict[str, str]:
    """Add the setting that the client does not read from the environment if a timeout is passed to it."""
    from_environment = os.environ.get(_ALLOW_HTTP[scheme])
    return ({"allow_http": from_environment} if from_environment else {}) | dict(options)


def _wrong_options(url: str, error: Exception) -> ConfigError:
    reason = str(error).partition("\n\nDebug source:")[0]
    return ConfigError(f"store: the options for {url} are not valid: {reason}")


def _fault(error: Exception) -> Fault:
    return read_fault(type(error).__name__, str(error))


def _update_mode(version: Version) -> PutMode:
    mode: dict[str, str] = {}
    if version.etag is not None:
        mode["e_tag"] = version.etag
    if version.generation is not None:
        mode["version"] = version.generation
    if not mode:
        raise InvalidInput("put_if_match needs the version that a read or a write returned, not an empty one")
    return cast("PutMode", mode)


def _payload(views: Sequence[memoryview]) -> memoryview | list[memoryview] | bytes:
    filled = [view for view in views if view.nbytes]
    return filled if len(filled) > 1 else filled[0] if filled else b""


def _part(data: bytes | memoryview | obstore.Bytes) -> Blob:
    return Blob(data=memoryview(data), version=None)
