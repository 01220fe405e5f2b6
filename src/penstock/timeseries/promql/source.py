"""Where the samples of a query come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from penstock.timeseries.arrays import Floats, Times
from penstock.timeseries.matcher import Matcher, select_labels
from penstock.timeseries.model import Labels, Samples, Series
from penstock.timeseries.promql.tree import Selection

__all__ = ["FetchedSource", "SelectedSeries", "SeriesSource", "StaticSource"]

SelectedSeries: TypeAlias = tuple[Labels, Times, Floats]
"""Labels, timestamps in rising order without repetition, and their values."""


class SeriesSource(Protocol):
    """Answers selectors. It is asked from the thread that evaluates, and may be asked twice for the same."""

    def select(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[SelectedSeries]:
        """Every series that satisfies all matchers, with its samples in `[start_ms, end_ms]`.

        Each label set comes once; stale markers are included.
        """
        ...


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """What was read beforehand, selection by selection: for storage that has to be awaited.

    A selection answers for every one that it covers.
    """

    answers: Mapping[Selection, list[SelectedSeries]]

    def select(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[SelectedSeries]:
        wanted = Selection(tuple(matchers), start_ms, end_ms)
        if wanted in self.answers:
            return self.answers[wanted]
        covering = next(one for one in self.answers if one.covers(wanted))
        return _between(self.answers[covering], start_ms, end_ms)


class StaticSource:
    """Series in memory."""

    def __init__(self, series: Sequence[Series]) -> None:
        parts: dict[Labels, list[Samples]] = {}
        for one in series:
            parts.setdefault(one.labels, []).append(one.samples)
        self._labels = list(parts)
        self._samples = [Samples.joined(samples).in_order() for samples in parts.values()]

    def select(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[SelectedSeries]:
        found: list[SelectedSeries] = []
        for row in select_labels(matchers, self._labels):
            samples = self._samples[row].between(start_ms, end_ms)
            if len(samples):
                found.append((self._labels[row], samples.timestamps, samples.values))
        return found


def _between(series: Sequence[SelectedSeries], start_ms: int, end_ms: int) -> list[SelectedSeries]:
    """What lies within the times, as views; series without any of it are left out."""
    found: list[SelectedSeries] = []
    for labels, timestamps, values in series:
        low, high = np.searchsorted(timestamps, (start_ms, end_ms + 1)).tolist()
        if high > low:
            found.append((labels, timestamps[low:high], values[low:high]))
    return found
