"""The newest value of many series as text, for another Prometheus to scrape: `/federate`."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.timeseries.api.answers import Answer
from penstock.timeseries.float_text import json_texts
from penstock.timeseries.model import METRIC_NAME, Labels
from penstock.timeseries.promql import ResultSeries

__all__ = ["federation_answer"]

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def federation_answer(series: Iterable[ResultSeries]) -> Answer:
    """One line per series with a name: labels, value, milliseconds. Lines of one metric are together."""
    named = sorted(
        (one for one in series if one.labels.metric), key=lambda one: (one.labels.metric, one.labels)
    )
    lines: list[str] = []
    metric = ""
    for one in named:
        if one.labels.metric != metric:
            metric = one.labels.metric
            lines.append(f"# TYPE {metric} untyped\n")
        lines.append(f"{_labelled(one.labels)} {json_texts(one.values[-1:])[0]} {int(one.timestamps[-1])}\n")
    return Answer(200, "".join(lines).encode(), _CONTENT_TYPE)


def _labelled(labels: Labels) -> str:
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels if name != METRIC_NAME)
    return f"{labels.metric}{{{pairs}}}" if pairs else labels.metric
