"""Queries and their expected results, as lines of text (`tests/golden/promql`).

    data 5m                      series whose samples are so far apart, from 0 on; what was before is gone
      up{job="a"} | 0+10x3 _ 7   labels, and values as `promql_doubles.values_of` reads them
    also 1ms                     more series beside them
    at 50m                       the queries below are asked at this time
      sum(up) | {} 30            a query, and its answer
    steps 0 10m 5m               the queries below are asked at every step from start to end
      up | up{job="a"} 0 10 _    a value per step, `_` where there is none
    differs Why it does.         the next query is known to answer something else; it fails if it does not
      up | up 2

An answer is series behind `;`, a number, a text in quotes, `nothing`, `fails` with what the error says, or
`refused` with the name of what is not supported. `in order` says that the order counts, `samples` that a
range is answered, each value with its second: `up 1@60 2@120`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.timeseries.promql_doubles import labels_of

from penstock.timeseries import Labels
from penstock.timeseries.api import parse_step
from penstock.timeseries.model import NO_LABELS

FOLDER = Path(__file__).parents[2] / "golden" / "promql"
_SERIES = re.compile(r"(?P<labels>[\w:]*\{.*\}|[a-zA-Z_:][\w:]*)\s+(?P<values>[^{}]*)")


@dataclass(frozen=True)
class Case:
    """One query, at the times from start to end, `step_ms` apart, or at one time without a step."""

    place: str
    query: str
    answer: str
    start_ms: int
    end_ms: int
    step_ms: int | None
    differs: str


@dataclass
class DataSet:
    """Series as labels and values, by the distance of their samples, and the queries over them."""

    place: str
    series: list[tuple[int, str, str]] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)


def data_sets() -> Iterator[DataSet]:
    """Return all data sets of the folder, in the order of the files and their lines."""
    for path in sorted(FOLDER.glob("*.txt")):
        yield from _Reader(path.stem).read(path.read_text())


class _Reader:
    """Reader of one file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: list[DataSet] = []
        self._apart_ms: int | None = None
        self._when: tuple[int, int, int | None] = (0, 0, None)
        self._differs = ""

    def read(self, text: str) -> list[DataSet]:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                self._line(f"{self._name}:{number}", line)
        return self._found

    def _line(self, place: str, line: str) -> None:
        if line.startswith(" "):
            self._entry(place, *(part.strip() for part in line.rsplit(" | ", 1)))
            return
        word, _, rest = line.partition(" ")
        times = [parse_step(time) for time in rest.split()] if word != "differs" else []
        if word == "data":
            self._found.append(DataSet(place))
            (self._apart_ms,) = times
        elif word == "also":
            (self._apart_ms,) = times
        elif word == "at":
            self._apart_ms, self._when = None, (times[0], times[0], None)
        elif word == "steps":
            self._apart_ms, self._when = None, (times[0], times[1], times[2])
        else:
            assert word == "differs", f"{place}: {line}"
            self._differs = rest

    def _entry(self, place: str, left: str, right: str) -> None:
        if self._apart_ms is not None:
            self._found[-1].series.append((self._apart_ms, left, right))
            return
        self._found[-1].cases.append(Case(place, left, right, *self._when, self._differs))
        self._differs = ""


def answered_series(text: str) -> list[tuple[Labels, list[str]]]:
    """Return the labels and the words of each series of a result."""
    found = []
    for part in text.split("; "):
        match = _SERIES.fullmatch(part.strip())
        assert match is not None, part
        labels = NO_LABELS if match["labels"] == "{}" else labels_of(match["labels"])
        found.append((labels, match["values"].split()))
    return found
