"""The steps a query is evaluated at, and where its selectors look from there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.timeseries.arrays import Times

__all__ = ["Grid"]


@dataclass(frozen=True, slots=True)
class Grid:
    """`count` steps from `start_ms`, `step_ms` apart. An instant query has one step."""

    start_ms: int
    step_ms: int
    count: int

    @property
    def end_ms(self) -> int:
        """The last step."""
        return self.start_ms + (self.count - 1) * self.step_ms

    @property
    def times(self) -> Times:
        return self.start_ms + self.step_ms * np.arange(self.count, dtype=np.int64)
