"""Bytes of frames from wherever they are: in memory, or in a file that is read as far as it is needed."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np

from penstock.storage import FileView
from penstock.topics.columns import Places

__all__ = ["StoredBytes", "gathered", "span"]

StoredBytes: TypeAlias = memoryview | FileView
"""Those of a file may have zeros where it cannot be read: a frame from it counts if its checksum is right."""

_DENSE: Final = 4
"""Bytes copied per byte wanted up to which one copy of the whole range is cheaper than many small ones."""
_NEAR: Final = 4096
"""Bytes between two frames up to which it is cheaper to read them than to read twice."""


def span(view: StoredBytes, start: int, stop: int) -> bytes:
    """The bytes `start` to `stop - 1`, copied once."""
    return view.read(start, stop) if isinstance(view, FileView) else view[start:stop].tobytes()


def gathered(view: StoredBytes, starts: Places, lengths: Places) -> tuple[bytes, Places]:
    """These frames, of which there is at least one, in memory of our own, and where each begins there."""
    first, last = int(starts.min()), int((starts + lengths).max())
    if last - first <= _DENSE * int(lengths.sum()):
        return span(view, first, last), starts - first
    if isinstance(view, FileView):
        return _read_near(view, starts, lengths)
    spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    return b"".join([view[start:stop] for start, stop in spans]), np.cumsum(lengths) - lengths


def _read_near(view: FileView, starts: Places, lengths: Places) -> tuple[bytes, Places]:
    """One read for frames that are near each other."""
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    far = begins[1:] - ends[:-1] > _NEAR
    lows = begins[np.concatenate(([True], far))]
    highs = ends[np.concatenate((far, [True]))]
    parts = [view.read(low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
    moved = np.cumsum(highs - lows) - highs
    places = np.empty_like(starts)
    places[order] = begins + moved[np.concatenate(([0], np.cumsum(far)))]
    return b"".join(parts), places
