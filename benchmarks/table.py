"""The table that a run prints: measurements, references and verdicts."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Row", "print_table", "write_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. `ceiling` is the figure of the reference named in `against`, from the same run."""

    section: str
    what: str
    ours: float
    unit: str
    ceiling: float | None = None
    against: str = ""
    bar: float | None = None
    ratio: float | None = None
    """Median of the per-round ratios if given, otherwise `ours / ceiling`."""
    at_most: bool = False
    """True if the threshold is an upper bound."""
    note: str = ""

    @property
    def share(self) -> float | None:
        if self.ratio is not None or not self.ceiling:
            return self.ratio
        return self.ours / self.ceiling

    @property
    def met(self) -> bool | None:
        if self.bar is None or self.share is None:
            return None
        return self.share <= self.bar if self.at_most else self.share >= self.bar


_HEAD = ("what", "ours", "ceiling", "unit", "ratio", "bar", "met", "against")


def print_table(rows: Sequence[Row]) -> None:
    """Print every row in fixed columns, then notes that specify each comparison."""
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    section = ""
    print(_line(_HEAD, widths))
    for row, cells in zip(rows, lines[1:], strict=True):
        if row.section != section:
            section = row.section
            print(f"\n{section}")
        print(_line(cells, widths))
    print()
    for note in dict.fromkeys(f"{row.section}: {row.note}" for row in rows if row.note):
        print(f"  {note}")
    print(_verdict(rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if 0 < column < 6 and column != 3 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    sign = "<=" if row.at_most else ">="
    return (
        f"  {row.what}",
        _figure(row.ours),
        "" if row.ceiling is None else _figure(row.ceiling),
        row.unit,
        "" if row.share is None else f"{row.share:.2f}",
        "" if row.bar is None else f"{sign} {row.bar:g}",
        "" if row.met is None else ("yes" if row.met else "NO"),
        row.against,
    )


def _figure(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _verdict(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.met is not None]
    missed = [row.what for row in judged if not row.met]
    text = f"\n{len(judged) - len(missed)} of {len(judged)} bars met"
    return f"{text}; missed: {'; '.join(missed)}" if missed else text


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows with share and verdict, and a description of the machine."""
    document = {
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "load_1m": os.getloadavg()[0],
        },
        "rows": [{**asdict(row), "ratio": row.share, "met": row.met} for row in rows],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
