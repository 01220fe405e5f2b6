"""What two answers have to have in common, and the first thing that they have not."""

from __future__ import annotations

import math
from typing import Any

from tests.peers.peer import Reply

__all__ = ["difference"]

RELATIVE = 1e-9


def difference(theirs: Reply, ours: Reply, *, ordered: bool, noise: float = 0.0) -> str | None:
    """None, or how they differ. Values may differ in their last digits; series count by their labels."""
    verdicts = [(reply.status, reply.body.get("errorType")) for reply in (theirs, ours)]
    if verdicts[0] != verdicts[1]:
        return f"{verdicts[0]} {theirs.body.get('error')} and {verdicts[1]} {ours.body.get('error')}"
    if theirs.status != 200:
        return None
    kinds = [reply.data["resultType"] for reply in (theirs, ours)]
    if kinds[0] != kinds[1]:
        return f"a {kinds[0]} and a {kinds[1]}"
    results = [reply.data["result"] for reply in (theirs, ours)]
    if kinds[0] == "string":
        return None if results[0] == results[1] else f"{results[0]} and {results[1]}"
    if kinds[0] == "scalar":
        return _of_points([results[0]], [results[1]], noise)
    return _of_series(*results, ordered=ordered, noise=noise)


def _of_series(
    theirs: list[dict[str, Any]], ours: list[dict[str, Any]], *, ordered: bool, noise: float
) -> str | None:
    if not ordered:
        theirs, ours = sorted(theirs, key=_labels), sorted(ours, key=_labels)
    if list(map(_labels, theirs)) != list(map(_labels, ours)):
        return f"series {list(map(_labels, theirs))} and {list(map(_labels, ours))}"
    for one, other in zip(theirs, ours, strict=True):
        found = _of_points(
            one.get("values") or [one["value"]], other.get("values") or [other["value"]], noise
        )
        if found is not None:
            return f"{one['metric']}: {found}"
    return None


def _labels(series: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted(series["metric"].items())


def _of_points(theirs: list[list[Any]], ours: list[list[Any]], noise: float) -> str | None:
    times = [point[0] for point in theirs], [point[0] for point in ours]
    if times[0] != times[1]:
        return f"points at {sorted(set(times[0]) ^ set(times[1]))[:5]} have only one of them"
    for one, other in zip(theirs, ours, strict=True):
        if not _equal(float(one[1]), float(other[1]), noise):
            return f"{one[1]} and {other[1]} at {one[0]}"
    return None


def _equal(left: float, right: float, noise: float) -> bool:
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return math.isclose(left, right, rel_tol=RELATIVE, abs_tol=noise)
