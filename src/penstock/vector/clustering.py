"""The arithmetic of posting lists: distances, nearest centroids, and cutting a group in two."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.vector.model import Floats

__all__ = ["Slots", "distances", "halves", "nearest", "squares"]

Slots = npt.NDArray[np.int64]

_CHUNK_CELLS: Final = 4 * 1024**2
"""Distances computed at once: 16 MiB of them."""
_PIECE_MAX: Final = 240_000
"""Multiplications that are done on one core."""
_TOGETHER_MAX: Final = 32_000_000
"""Above this many, all cores are worth waiting for."""
_ROUNDS: Final = 6


def squares(rows: Floats) -> Floats:
    """The squared length of each row."""
    lengths: Floats = np.einsum("ij,ij->i", rows, rows)
    return lengths


def distances(rows: Floats, centroids: Floats) -> Floats:
    """Squared distances of all rows to all centroids, less the squared length of the row.

    The same is missing from every distance of a row, so that they compare as the whole distances do.
    """
    return squares(centroids)[None, :] - 2.0 * _products(rows, centroids)


def _products(rows: Floats, centroids: Floats) -> Floats:
    """The dot products of all with all; where that is little work, in pieces that one core does.

    For more than a piece the linear algebra below numpy calls all cores together, and waiting for them on a
    busy machine takes longer than the work.
    """
    cells = centroids.size
    if not cells or len(rows) * cells > _TOGETHER_MAX:
        return rows @ centroids.T
    step = max(1, _PIECE_MAX // cells)
    if step >= len(rows):
        return rows @ centroids.T
    made = np.empty((len(rows), len(centroids)), np.float32)
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        np.matmul(rows[part], centroids.T, out=made[part])
    return made


def nearest(rows: Floats, centroids: Floats) -> Slots:
    """The number of the nearest centroid of each row."""
    found = np.empty(len(rows), np.int64)
    step = max(1, _CHUNK_CELLS // max(1, len(centroids)))
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        found[part] = distances(rows[part], centroids).argmin(axis=1)
    return found


def halves(rows: Floats, *, smallest: int) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Cut a group by 2-means: which rows are in the second half, and the two centroids.

    Where a half has fewer than `smallest` rows, the cut is moved to the middle of the line between the
    centroids, so that lists stay of a size. Seeds are the row farthest from the mean and the one farthest
    from that: the same rows are always cut in the same way.
    """
    first = rows[_farthest(rows, rows.mean(axis=0))]
    centroids = np.stack((first, rows[_farthest(rows, first)]))
    second = np.zeros(len(rows), np.bool_)
    for _ in range(_ROUNDS):
        before, second = second, distances(rows, centroids).argmin(axis=1) == 1
        if not second.any() or second.all() or bool((before == second).all()):
            break
        centroids = _means(rows, second)
    if min(int(second.sum()), int((~second).sum())) < smallest:
        second = _middle_cut(rows, centroids)
        centroids = _means(rows, second)
    return second, centroids


def _farthest(rows: Floats, point: Floats) -> int:
    apart = rows - point
    return int(squares(apart).argmax())


def _means(rows: Floats, second: npt.NDArray[np.bool_]) -> Floats:
    return np.stack((rows[~second].mean(axis=0), rows[second].mean(axis=0))).astype(np.float32)


def _middle_cut(rows: Floats, centroids: Floats) -> npt.NDArray[np.bool_]:
    order = np.argsort(rows @ (centroids[1] - centroids[0]), kind="stable")
    second = np.zeros(len(rows), np.bool_)
    second[order[len(rows) // 2 :]] = True
    return second
