"""Where the samples of a query come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

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
    """What was read beforehand, selection by selection: for storage that has to be awaited."""

    answers: Mapping[Selection, list[SelectedSeries]]

    def select(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[SelectedSeries]:
        return self.answers[Selection(tuple(matchers), start_ms, end_ms)]


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
