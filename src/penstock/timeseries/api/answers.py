"""Responses in the envelope of Prometheus.

    {"status":"success","data":...}
    {"status":"success","data":...,"warnings":["..."]}
    {"status":"error","errorType":"bad_data","error":"..."}

Times are seconds with up to three decimals. Values are strings, because JSON has no NaN and no infinity.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.errors import (
    Fenced,
    InvalidInput,
    LimitExceeded,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    Rejected,
    Unavailable,
    Unsupported,
    public_text,
)
from penstock.timeseries.model import METRIC_NAME, Labels, Metadata, MetricType, Times, json_texts
from penstock.timeseries.promql import (
    ExecutionError,
    QueryResult,
    QueryTimeout,
    ResultSeries,
    ResultType,
    TooManySamples,
)

_TRUNCATED: Final = "results truncated due to limit"
# The first match applies, so subclasses come before their base classes.
_ERRORS: Final = (
    (QueryTimeout, 422, "timeout"),
    (TooManySamples, 422, "execution"),
    (ExecutionError, 422, "execution"),
    (Unsupported, 422, "execution"),
    (NotFound, 404, "not_found"),
    (InvalidInput, 400, "bad_data"),
    (LimitExceeded, 400, "bad_data"),
    (Rejected, 400, "bad_data"),
    (Unavailable, 503, "unavailable"),
    # Another process serves the database, or this one must be restarted. Senders retry on 503.
    (Fenced, 503, "unavailable"),
    (OutcomeUnknown, 503, "unavailable"),
    (PenstockError, 500, "internal"),
)
_TYPES: Final = {
    MetricType.GAUGE: "gauge",
    MetricType.HISTOGRAM: "histogram",
    MetricType.EXPONENTIAL_HISTOGRAM: "histogram",
    MetricType.SUMMARY: "summary",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: a status and a JSON body."""

    status: int
    body: bytes
    content_type: str = "application/json"


def query_answer(result: QueryResult, warnings: Sequence[str] = ()) -> Answer:
    """Return the response for the result of a query and its warnings."""
    if result.result_type is ResultType.STRING:
        data = f"[{_time_texts([result.at_ms])[0]},{_json(result.text)}]"
    elif result.result_type is ResultType.SCALAR:
        data = _points(result.series[0], {})[0]
    else:
        member, times = _MEMBERS[result.result_type], dict[bytes, list[str]]()
        data = f"[{','.join(member(series, times) for series in result.series)}]"
    return _success(f'{{"resultType":"{result.result_type.value}","result":{data}}}', warnings)


def series_answer(series: Iterable[Labels], limit: int | None = None, warnings: Sequence[str] = ()) -> Answer:
    """Return the response with label sets, sorted and without duplicates."""
    ordered = sorted(set(series))
    return _limited([_json(dict(labels)) for labels in ordered[:limit]], len(ordered), warnings)


def names_answer(names: Iterable[str], limit: int | None = None, warnings: Sequence[str] = ()) -> Answer:
    """Return the response with label names or values, sorted and without duplicates."""
    ordered = sorted(set(names))
    return _limited([_json(name) for name in ordered[:limit]], len(ordered), warnings)


def metadata_answer(
    metrics: Mapping[str, Sequence[Metadata]], limit: int | None = None, limit_per_metric: int | None = None
) -> Answer:
    """Return the response with the metadata of each metric, by name."""
    data = {
        name: [_metadata(one) for one in dict.fromkeys(metrics[name])][:limit_per_metric]
        for name in sorted(metrics)[:limit]
    }
    return _success(_json(data))


def error_answer(error: PenstockError) -> Answer:
    """Return the response for an error: 400 or 422 for a client error, 503 to retry, 500 for an internal
    error."""
    status, kind = next((status, kind) for cls, status, kind in _ERRORS if isinstance(error, cls))
    body = {"status": "error", "errorType": kind, "error": public_text(error)}
    return Answer(status, msgspec.json.encode(body))


def _matrix_member(series: ResultSeries, times: dict[bytes, list[str]]) -> str:
    return f'{{"metric":{_json(dict(series.labels))},"values":[{",".join(_points(series, times))}]}}'


def _vector_member(series: ResultSeries, times: dict[bytes, list[str]]) -> str:
    return f'{{"metric":{_json(dict(series.labels))},"value":{_points(series, times)[0]}}}'


_MEMBERS: Final = {ResultType.MATRIX: _matrix_member, ResultType.VECTOR: _vector_member}


def _points(series: ResultSeries, times: dict[bytes, list[str]]) -> list[str]:
    """Return the points as JSON. Format times once for all series that share them, as most do."""
    key = series.timestamps.tobytes()
    texts = times.get(key)
    if texts is None:
        texts = times[key] = _time_texts(series.timestamps)
    return [f'[{time},"{value}"]' for time, value in zip(texts, json_texts(series.values), strict=True)]


def _time_texts(timestamps: Times | list[int]) -> list[str]:
    times = timestamps if isinstance(timestamps, list) else timestamps.tolist()
    return [_time_text(time) if time % 1000 else str(time // 1000) for time in times]


def _time_text(time_ms: int) -> str:
    sign, size = ("-", -time_ms) if time_ms < 0 else ("", time_ms)
    return f"{sign}{size // 1000}.{size % 1000:03d}"


def _metadata(metadata: Metadata) -> dict[str, str]:
    kind = _TYPES.get(metadata.metric_type, "unknown")
    if metadata.metric_type is MetricType.SUM:
        kind = "counter" if metadata.monotonic else "gauge"
    return {"type": kind, "unit": metadata.unit, "help": metadata.description}


def _limited(items: list[str], total: int, warnings: Sequence[str]) -> Answer:
    shown = [*warnings, _TRUNCATED] if len(items) < total else warnings
    return _success(f"[{','.join(items)}]", shown)


def _success(data: str, warnings: Sequence[str] = ()) -> Answer:
    suffix = f',"warnings":{_json(warnings)}' if warnings else ""
    return Answer(200, f'{{"status":"success","data":{data}{suffix}}}'.encode())


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


_PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
_QUOTED: Final = "text/plain; version=1.0.0; charset=utf-8; escaping=allow-utf-8"
_METRIC: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def reads_any_name(accept: str) -> bool:
    """Return whether the Accept header allows quoted names."""
    return any(
        "text/plain" in one and "escaping=allow-utf-8" in one
        for one in accept.replace(" ", "").lower().split(",")
    )


def federation_answer(series: Iterable[ResultSeries], *, any_name: bool = False) -> Answer:
    """Return one line per named series: labels, value, milliseconds. Group the lines by metric."""
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
