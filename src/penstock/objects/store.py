"""The object store as Penstock sees it: seven calls and three outcomes of a conditional write.

A conditional write returns (won), raises `Conflict` (lost: the object was not in the expected
state), or raises `OutcomeUnknown` (it may have been applied: re-read before doing anything).
Every other error is definite: nothing was applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from penstock.errors import InvalidInput, PenstockError

Data: TypeAlias = bytes | bytearray | memoryview | Sequence[bytes | bytearray | memoryview]
"""What can be stored: one buffer, or several that are stored one after the other.

A sequence may build its buffers when they are asked for: a store goes through it once per attempt, from the
first to the last, and keeps no more of it than it must."""


@dataclass(frozen=True, slots=True)
class Version:
    """What a store calls this state of an object: opaque, only good for comparing and for `put_if_match`."""

    etag: str | None = None
    generation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Part of an object: `length` bytes from `start`, or the last `length` bytes when `start` is None."""

    start: int | None
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """An object's bytes. `version` is None for a ranged read."""

    data: memoryview
    version: Version | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a listing or `head` tells. `version` may be None in a listing."""

    key: str
    size: int
    modified_ms: int
    version: Version | None = None


@runtime_checkable
class ObjectStore(Protocol):
    """One bucket, or one folder of it. Keys are normalised (`penstock.objects.keys`)."""

    @property
    def url(self) -> str:
        """Where this is, for people: no credentials in it."""
        ...

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        """The object, or part of it. Raises `NotFound`, `Unavailable`, `PermissionDenied`.

        A range that reaches past the end returns the bytes there are.
        """
        ...

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        """The object, or None while it is still in `version`. Raises as `get`."""
        ...

    async def put(self, key: str, data: Data) -> Version:
        """Store, replacing what is there. Returns when durable. Safe to repeat."""
        ...

    async def put_if_absent(self, key: str, data: Data) -> Version:
        """Create. Raises `Conflict` if the key exists, `OutcomeUnknown` if that is not known."""
        ...

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        """Replace `version`. Raises `Conflict` if it changed or is gone, `OutcomeUnknown` as above."""
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Size, age and version without the bytes. Raises `NotFound`."""
        ...

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """Every object below the folder `prefix` ("" for all), in key order."""
        ...

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        """Delete; a missing key counts as deleted. Returns what failed, key by key."""
        ...

    async def close(self) -> None:
        """Release threads and connections. The store must not be used afterwards."""
        ...


def flat_views(data: Data) -> list[memoryview]:
    """The buffers of `data` in order, each as a byte view. Raises `InvalidInput` for anything else."""
    try:
        buffers = [data] if isinstance(data, bytes | bytearray | memoryview) else list(data)
        return [memoryview(buffer).cast("B") for buffer in buffers]
    except TypeError as error:
        raise InvalidInput(
            f"an object's data is bytes or a sequence of contiguous buffers: {error}"
        ) from error


def lazy_views(data: Data) -> Iterable[memoryview]:
    """The same, one buffer at a time: what `data` builds on demand is built only when it is taken."""
    if isinstance(data, bytes | bytearray | memoryview | list | tuple):
        return flat_views(data)
    return (memoryview(buffer).cast("B") for buffer in data)
