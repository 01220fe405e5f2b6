"""The newest value of many series as text, for another Prometheus to scrape: `/federate`.

Names may be any UTF-8, and the plain text format knows letters, digits and `_` only. Who says that it reads
other names gets them in quotes; to others such series are not shown, and a comment says how many there are.

    {"a.b","a label"="value"} 1 1700000000000
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from penstock.timeseries.api.answers import Answer
from penstock.timeseries.float_text import json_texts
from penstock.timeseries.model import METRIC_NAME, Labels
from penstock.timeseries.promql import ResultSeries

__all__ = ["federation_answer", "reads_any_name"]

_PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
_QUOTED: Final = "text/plain; version=1.0.0; charset=utf-8; escaping=allow-utf-8"
_METRIC: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def reads_any_name(accept: str) -> bool:
    """Whether a scraper says, in what it accepts, that it reads names in quotes."""
    return any(
        "text/plain" in one and "escaping=allow-utf-8" in one
        for one in accept.replace(" ", "").lower().split(",")
    )


def federation_answer(series: Iterable[ResultSeries], *, any_name: bool = False) -> Answer:
    """One line per series with a name: labels, value, milliseconds. Lines of one metric are together."""
    named = [one for one in series if one.labels.metric]
    shown = named if any_name else [one for one in named if _is_plain(one.labels)]
    lines: list[str] = []
    metric = ""
    for one in sorted(shown, key=lambda one: (one.labels.metric, one.labels)):
        if one.labels.metric != metric:
            metric = one.labels.metric
            lines.append(f"# TYPE {_name(metric, _METRIC)} untyped\n")
        lines.append(f"{_labelled(one.labels)} {json_texts(one.values[-1:])[0]} {int(one.timestamps[-1])}\n")
    if len(shown) < len(named):
        lines.append(f"# {len(named) - len(shown)} series are not shown: accept escaping=allow-utf-8\n")
    return Answer(200, "".join(lines).encode(), _QUOTED if any_name else _PLAIN)


def _is_plain(labels: Labels) -> bool:
    names = (name for name, _ in labels if name != METRIC_NAME)
    return _METRIC.fullmatch(labels.metric) is not None and all(map(_LABEL.fullmatch, names))


def _labelled(labels: Labels) -> str:
    pairs = [f"{_name(name, _LABEL)}={_quoted(value)}" for name, value in labels if name != METRIC_NAME]
    if _METRIC.fullmatch(labels.metric):
        return f"{labels.metric}{{{','.join(pairs)}}}" if pairs else labels.metric
    return f"{{{','.join([_quoted(labels.metric), *pairs])}}}"


def _name(name: str, plain: re.Pattern[str]) -> str:
    return name if plain.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'
