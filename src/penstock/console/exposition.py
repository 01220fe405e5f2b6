"""Numbers out of the text that `/metrics` serves. Pure, and only as much of the format as is needed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["Exposition"]

_REST: Final = re.compile(r'(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*)\})?[ \t]+(\S+)')
"""What follows the name in a line: labels and a value. A time, or an exemplar behind ` # `, is not read."""
_ESCAPED: Final = re.compile(r"\\(.)")
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Exposition:
    """Every sample of one scrape. What does not parse, or is no finite number, is left out.

    A part tells hundreds of numbers and few of them are shown, so a line is read when it is asked for.
    """

    def __init__(self, text: str) -> None:
        self._text = f"\n{text}"
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}

    def _of(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        if name not in self._samples:
            self._samples[name] = list(self._read(name))
        return self._samples[name]

    def _read(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        start = f"\n{name}"
        at = self._text.find(start)
        while at >= 0:
            found = _REST.match(self._text, at + len(start))
            value = math.nan if found is None else _number(found[2])
            if found is not None and math.isfinite(value):
                yield _labels(found[1]) if found[1] else {}, value
            at = self._text.find(start, at + 1)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of a metric's samples that have these labels; None if there is none."""
        values = [
            value
            for has, value in self._of(name)
            if all(has.get(key) == text for key, text in labels.items())
        ]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric by one of its labels."""
        totals: dict[str, float] = {}
        for has, value in self._of(name):
            key = has.get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        return totals


def _labels(text: str) -> dict[str, str]:
    return {name: _ESCAPED.sub(_unescaped, value) for name, value in _LABEL.findall(text)}


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
