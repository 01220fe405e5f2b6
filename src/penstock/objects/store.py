"""The interface of an object store, and the three outcomes of a conditional write.

A conditional write that succeeds returns. It raises `Conflict` if the object was not in the expected state.
It raises `OutcomeUnknown` if it may have been applied: read the object again before doing anything else.
Every other error is definite: nothing was applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from penstock.errors import InvalidInput, PenstockError

Data: TypeAlias = bytes | bytearray | memoryview | Sequence[bytes | bytearray | memoryview]
"""The data of an object: one buffer, or several that are stored one after the other.

A sequence may build its buffers on demand. A store iterates over it once per attempt, and keeps as few
buffers in memory as possible.
"""


@dataclass(frozen=True, slots=True)
class Version:
    """The store's version of an object. It is opaque: use it only for comparisons and `put_if_match`."""

    etag: str | None = None
    generation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Part of an object: `length` bytes from `start`, or the last `length` bytes if `start` is None."""

    start: int | None
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """The bytes of an object. `version` is None for a ranged read."""

    data: memoryview
    version: Version | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """The metadata of an object. `version` may be None in a listing."""

    key: str
    size: int
    modified_ms: int
    version: Version | None = None


@runtime_checkable
class ObjectStore(Protocol):
    """A bucket, or a folder of it. Keys are normalised (`penstock.objects.keys`)."""

    @property
    def url(self) -> str:
        """The location of the store for display, without credentials."""
        ...

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        """Read an object, or part of it. Raise `NotFound`, `Unavailable` or `PermissionDenied`.

        A range beyond the end returns the existing bytes.
        """
        ...

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        """Read the object, or return None if it still has `version`. Raise the same errors as `get`."""
        ...

    async def put(self, key: str, data: Data) -> Version:
        """Create or replace the object. It is durable on return. Safe to repeat."""
        ...

    async def put_if_absent(self, key: str, data: Data) -> Version:
        """Create the object. Raise `Conflict` if the key exists, `OutcomeUnknown` if that is not known."""
        ...

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        """Replace `version`. Raise `Conflict` if it was replaced or deleted, `OutcomeUnknown` as above."""
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Return size, modification time and version without the bytes. Raise `NotFound`."""
        ...

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """List every object below the folder `prefix` ("" for all), in the order of keys."""
        ...

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        """Delete objects, and return the error of each key that failed. A missing one counts as deleted."""
        ...

    async def close(self) -> None:
        """Release threads and connections. The store must not be used afterwards."""
        ...


def flat_views(data: Data) -> list[memoryview]:
    """Return the buffers of `data` in order, each as a byte view. Raise `InvalidInput` for other types."""
    try:
        buffers = [data] if isinstance(data, bytes | bytearray | memoryview) else list(data)
        return [memoryview(buffer).cast("B") for buffer in buffers]
    except TypeError as error:
        raise InvalidInput(
            f"an object's data is bytes or a sequence of contiguous buffers: {error}"
        ) from error


def lazy_views(data: Data) -> Iterable[memoryview]:
    """Iterate over the buffers of `data`. Build those that are made on demand one at a time."""
    if isinstance(data, bytes | bytearray | memoryview | list | tuple):
        return flat_views(data)
    return (memoryview(buffer).cast("B") for buffer in data)
