"""`Data` taken apart: one buffer or several, as flat byte views."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import InvalidInput
from penstock.objects.store import Data

__all__ = ["flat_views", "lazy_views"]


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
    """The same for who needs one buffer at a time: what `data` builds on demand is built only then."""
    if isinstance(data, bytes | bytearray | memoryview | list | tuple):
        return flat_views(data)
    return (memoryview(buffer).cast("B") for buffer in data)
