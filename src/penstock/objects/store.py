"""The interface of an object store: seven calls, and three outcomes of a conditional write.

A conditional write returns (won), raises `Conflict` (lost: the object was not in the expected state), or
raises `OutcomeUnknown` (it may have been applied: read again before doing anything). Every other error is
definite: nothing was applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from penstock.errors import InvalidInput, PenstockError

Data: TypeAlias = bytes | bytearray | memoryview | Sequence[bytes | bytearray | memoryview]
"""The data of an object: one buffer, or several that are stored one after the other.

A sequence may build its buffers on demand: a store iterates over it once per attempt, and holds as few of
them as possible.
"""


@dataclass(frozen=True, slots=True)
class Version:
    """The version of an object, as the store calls it: opaque, only for comparing and for `put_if_match`."""

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
        """The location of the store for people, without credentials."""
        ...

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        """Read an object, or part of it. Raises `NotFound`, `Unavailable`, `PermissionDenied`.

        A range beyond the end returns the existing bytes.
        """
        ...

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        """Read the object; None if it is still in `version`. Raises as `get`."""
        ...

    async def put(self, key: str, data: Data) -> Version:
        """Store the object, or replace it. Returns when it is durable. Safe to repeat."""
        ...

    async def put_if_absent(self, key: str, data: Data) -> Version:
        """Create the object. Raises `Conflict` if the key exists, `OutcomeUnknown` if that is not known."""
        ...

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        """Replace `version`. Raises `Conflict` if it changed or is gone, `OutcomeUnknown` as above."""
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Read size, age and version without the bytes. Raises `NotFound`."""
        ...

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """List every object below the folder `prefix` ("" for all), in the order of keys."""
        ...

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        """Delete objects; a missing one counts as deleted. Returns the error of each key that failed."""
        ...

    async def close(self) -> None:
        """Release threads and connections. The store must not be used afterwards."""
        ...


def flat_views(data: Data) -> list[memoryview]:
    """Return the buffers of `data` in order, each as a byte view. Raises `InvalidInput` for other types."""
    try:
        buffers = [data] if isinstance(data, bytes | bytearray | memoryview) else list(data)
        return [memoryview(buffer).cast("B") for buffer in buffers]
    except TypeError as error:
        raise InvalidInput(
            f"an object's data is bytes or a sequence of contiguous buffers: {error}"
        ) from error


def lazy_views(data: Data) -> Iterable[memoryview]:
    """Iterate over the buffers of `data`; those that are built on demand are built one at a time."""
    if isinstance(data, bytes | bytearray | memoryview | list | tuple):
        return flat_views(data)
    return (memoryview(buffer).cast("B") for buffer in data)
