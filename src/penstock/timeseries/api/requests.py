"""What each endpoint was asked for. Every function raises `InvalidInput` naming the wrong parameter."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import InvalidInput
from penstock.timeseries.api.parameters import (
    Parameters,
    optional_limit,
    optional_step,
    optional_time,
    required,
    single,
)
from penstock.timeseries.matcher import Matcher
from penstock.timeseries.promql import QUERY_CHARACTERS_MAX, ParseError, parse_selector

__all__ = [
    "InstantRequest",
    "MetadataRequest",
    "RangeRequest",
    "SeriesRequest",
    "instant_request",
    "labels_request",
    "metadata_request",
    "range_request",
    "series_request",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantRequest:
    """`/api/v1/query`."""

    query: str
    at_ms: int
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """`/api/v1/query_range`."""

    query: str
    start_ms: int
    end_ms: int
    step_ms: int
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRequest:
    """`/api/v1/series`, `/api/v1/labels`, `/api/v1/label/{name}/values`.

    A series counts if it satisfies any of the selectors, or if there is none. Times that were not
    given are None: all that is kept.
    """

    selectors: tuple[tuple[Matcher, ...], ...]
    start_ms: int | None
    end_ms: int | None
    limit: int | None

    @property
    def read_max(self) -> int | None:
        """How many to read: one more than are wanted tells that there are more."""
        return None if self.limit is None else self.limit + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRequest:
    """`/api/v1/metadata`."""

    metric: str | None
    limit: int | None
    limit_per_metric: int | None


def instant_request(parameters: Parameters, now_ms: int) -> InstantRequest:
    """A query at `time`, or now."""
    at_ms = optional_time(parameters, "time")
    return InstantRequest(
        query=required(parameters, "query"),
        at_ms=now_ms if at_ms is None else at_ms,
        timeout_s=_timeout(parameters),
    )


def range_request(parameters: Parameters) -> RangeRequest:
    """A query from `start` to `end` every `step`."""
    for name in ("query", "start", "end", "step"):
        required(parameters, name)
    start_ms, end_ms = optional_time(parameters, "start"), optional_time(parameters, "end")
    step_ms = optional_step(parameters, "step")
    assert start_ms is not None
    assert end_ms is not None
    assert step_ms is not None
    if end_ms < start_ms:
        raise InvalidInput('invalid parameter "end": end timestamp must not be before start time')
    if step_ms <= 0:
        raise InvalidInput(
            'invalid parameter "step": zero or negative query resolution step widths are not accepted. '
            "Try a positive integer"
        )
    return RangeRequest(
        query=required(parameters, "query"),
        start_ms=start_ms,
        end_ms=end_ms,
        step_ms=step_ms,
        timeout_s=_timeout(parameters),
    )


def series_request(parameters: Parameters) -> SeriesRequest:
    """Series by at least one `match[]`."""
    if not parameters.get("match[]"):
        raise InvalidInput("no match[] parameter provided")
    return labels_request(parameters)


def labels_request(parameters: Parameters) -> SeriesRequest:
    """Label names or values, of the series of `match[]` if any are given."""
    start_ms, end_ms = optional_time(parameters, "start"), optional_time(parameters, "end")
    if start_ms is not None and end_ms is not None and end_ms < start_ms:
        raise InvalidInput('invalid parameter "end": end timestamp must not be before start time')
    texts = parameters.get("match[]") or ()
    if sum(map(len, texts)) > QUERY_CHARACTERS_MAX:
        raise InvalidInput(
            f'invalid parameter "match[]": all of them are longer than {QUERY_CHARACTERS_MAX:,} characters'
        )
    return SeriesRequest(
        selectors=tuple(map(_selector, texts)),
        start_ms=start_ms,
        end_ms=end_ms,
        limit=optional_limit(parameters, "limit"),
    )


def metadata_request(parameters: Parameters) -> MetadataRequest:
    """What is known of metrics, or of one."""
    return MetadataRequest(
        metric=single(parameters, "metric"),
        limit=optional_limit(parameters, "limit"),
        limit_per_metric=optional_limit(parameters, "limit_per_metric"),
    )


def _selector(text: str) -> tuple[Matcher, ...]:
    try:
        return parse_selector(text)
    except ParseError as error:
        raise InvalidInput(f'invalid parameter "match[]": {error}') from None


def _timeout(parameters: Parameters) -> float | None:
    timeout_ms = optional_step(parameters, "timeout")
    return None if timeout_ms is None else timeout_ms / 1000
