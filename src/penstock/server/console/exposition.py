"""Numbers out of the text that `/metrics` serves. Pure, and only as much of the format as is needed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

__all__ = ["Exposition"]

_LINE: Final = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Exposition:
    """Every sample of one scrape. What does not parse, or is no finite number, is left out."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for line in text.splitlines():
            found = None if line.startswith("#") else _LINE.match(line)
            if found is None:
                continue
            try:
                value = float(found[3])
            except ValueError:
                continue
            if not math.isfinite(value):
                continue
            labels = dict(_LABEL.findall(found[2])) if found[2] else {}
            self._samples.setdefault(found[1], []).append((labels, value))

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of a metric's samples that have these labels; None if there is none."""
        values = [
            value
            for has, value in self._samples.get(name, [])
            if all(has.get(key) == text for key, text in labels.items())
        ]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric by one of its labels."""
        totals: dict[str, float] = {}
        for has, value in self._samples.get(name, []):
            key = has.get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        return totals
