"""Estimates of a ratio from paired turns: its centre and confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

__all__ = ["Estimate"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A centre and the interval that contains the true value with probability `sure`, for any noise.

    It is the Hodges-Lehmann estimator with the interval of Wilcoxon's signed ranks, on logarithms. It assumes
    only that the noise is symmetric, and outliers have little effect.
    """

    low: float
    middle: float
    high: float
    sure: float

    @classmethod
    def of(cls, quotients: Sequence[float], sure: float = 0.95) -> Estimate:
        """Estimate from ratios of independent pairs. With fewer than six, even the full range has a lower
        probability."""
        logs = [math.log(each) for each in quotients]
        means = sorted((one + two) / 2 for one, two in combinations_with_replacement(logs, 2))
        cut, out = _cut(len(logs), sure)
        low, middle, high = (
            math.exp(each) for each in (means[cut], statistics.median(means), means[-1 - cut])
        )
        return cls(low, middle, high, 1 - out)

    def __str__(self) -> str:
        return f"{self.middle:.4f}, between {self.low:.4f} and {self.high:.4f} ({self.sure:.0%} sure)"


def _cut(count: int, sure: float) -> tuple[int, float]:
    """Return the number of ordered means to drop at each end, and the probability of an error."""
    sums = [1] + [0] * (count * (count + 1) // 2)
    for rank in range(1, count + 1):  # the number of the 2^count sign choices with each sum of ranks
        for total in range(len(sums) - 1, rank - 1, -1):
            sums[total] += sums[total - rank]
    cut, tail = 0, sums[0]
    while 2 * (tail + sums[cut + 1]) <= (1 - sure) * 2**count:
        cut += 1
        tail += sums[cut]
    return cut, 2 * tail / 2**count
