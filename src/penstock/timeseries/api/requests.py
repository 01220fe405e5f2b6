"""Parsers for the parameters of each endpoint. Each raises `InvalidInput` that names the parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeAlias

from penstock.errors import InvalidInput
from penstock.timeseries.matchers import Matcher
from penstock.timeseries.promql import QUERY_CHARACTERS_MAX, ParseError, parse_selector

Parameters: TypeAlias = Mapping[str, Sequence[str]]
"""All values of each parameter name. Where one value is expected, the first one is used."""

_TIME_MAX_S: Final = 2**53 / 1000
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_RFC3339: Final = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})", re.ASCII
)
# A duration of the query language: units from the largest to the smallest, each at most once. Settings accept
# fewer forms.
_DURATION: Final = re.compile(
    "".join(rf"(?:([0-9]{{1,12}}){unit})?" for unit in ("y", "w", "d", "h", "m(?!s)", "s", "ms"))
)
_UNITS_MS: Final = (31_536_000_000, 604_800_000, 86_400_000, 3_600_000, 60_000, 1000, 1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def single(parameters: Parameters, name: str) -> str | None:
    """Return the first value, or None if it is missing or empty."""
    values = parameters.get(name) or ()
    return values[0] or None if values else None


def required(parameters: Parameters, name: str) -> str:
    """Return the first value. Raises `InvalidInput` if it is missing or empty."""
    value = single(parameters, name)
    if value is None:
        raise InvalidInput(f'invalid parameter "{name}": it is missing or empty')
    return value


def optional_time(parameters: Parameters, name: str) -> int | None:
    """Return a time in milliseconds, or None. Raises `InvalidInput` that names the parameter."""
    value = single(parameters, name)
    return None if value is None else _named(name, parse_time, value)


def optional_step(parameters: Parameters, name: str) -> int | None:
    """Return a duration in milliseconds, or None. Raises `InvalidInput` that names the parameter."""
    value = single(parameters, name)
    return None if value is None else _named(name, parse_step, value)


def optional_limit(parameters: Parameters, name: str) -> int | None:
    """Return a count, or None if it is missing or 0.

    Raises `InvalidInput` unless it is a number of at least 0.
    """
    value = single(parameters, name)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise InvalidInput(f'invalid parameter "{name}": {value!r} is not a number of results')
    return int(value) or None


def parse_time(text: str) -> int:
    """Parse float seconds or an RFC 3339 time, and return milliseconds since the Unix epoch.

    Raises `InvalidInput` if it is neither, or out of range.
    """
    if _NUMBER.fullmatch(text):
        seconds = float(text)
        if not math.isfinite(seconds) or abs(seconds) > _TIME_MAX_S:
            raise InvalidInput(f"{text!r} is out of the range of times")
        fraction, whole = math.modf(seconds)
        return int(whole) * 1000 + math.floor(fraction * 1000 + 0.5)
    found = _RFC3339.fullmatch(text)
    if found is None:
        raise InvalidInput(f"cannot parse {text!r} to a valid timestamp")
    return _moment(text, found)


def parse_step(text: str) -> int:
    """Parse float seconds or a duration such as `1m30s`, and return milliseconds.

    Raises `InvalidInput` if it is neither, or out of range.
    """
    found = _DURATION.fullmatch(text)
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    elif found is not None and text:
        amounts = zip(found.groups(default="0"), _UNITS_MS, strict=True)
        seconds = sum(int(amount) * unit_ms for amount, unit_ms in amounts) / 1000
    else:
        raise InvalidInput(f"cannot parse {text!r} to a valid duration")
    if not math.isfinite(seconds) or abs(seconds) > _TIME_MAX_S:
        raise InvalidInput(f"{text!r} is out of the range of durations")
    return round(seconds * 1000)


def _moment(text: str, found: re.Match[str]) -> int:
    whole, fraction, zone = found.groups()
    try:
        moment = datetime.fromisoformat(whole + zone.replace("Z", "+00:00"))
        seconds = (moment - _EPOCH).total_seconds()
    except (ValueError, OverflowError):
        raise InvalidInput(f"cannot parse {text!r} to a valid timestamp") from None
    return int(seconds) * 1000 + int((fraction or ".0")[1:4].ljust(3, "0"))


def _named(name: str, parse: Callable[[str], int], value: str) -> int:
    try:
        return parse(value)
    except InvalidInput as error:
        raise InvalidInput(f'invalid parameter "{name}": {error}') from None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantRequest:
    """A request to `/api/v1/query`."""

    query: str
    at_ms: int
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """A request to `/api/v1/query_range`."""

    query: str
    start_ms: int
    end_ms: int
    step_ms: int
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRequest:
    """A request to `/api/v1/series`, `/api/v1/labels` or `/api/v1/label/{name}/values`.

    It selects series that satisfy any of the selectors, or all series without selectors. A missing time is
    None and does not limit the range.
    """

    selectors: tuple[tuple[Matcher, ...], ...]
    start_ms: int | None
    end_ms: int | None
    limit: int | None

    @property
    def read_max(self) -> int | None:
        """Number of results to read: one more than requested, to detect truncation."""
        return None if self.limit is None else self.limit + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRequest:
    """A request to `/api/v1/metadata`."""

    metric: str | None
    limit: int | None
    limit_per_metric: int | None


def instant_request(parameters: Parameters, now_ms: int) -> InstantRequest:
    """Parse a query at `time`, which defaults to now."""
    at_ms = optional_time(parameters, "time")
    return InstantRequest(
        query=required(parameters, "query"),
        at_ms=now_ms if at_ms is None else at_ms,
        timeout_s=_timeout(parameters),
    )


def range_request(parameters: Parameters) -> RangeRequest:
    """Parse a query from `start` to `end` with a `step`."""
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
    """Parse a request for series with at least one `match[]`."""
    if not parameters.get("match[]"):
        raise InvalidInput("no match[] parameter provided")
    return labels_request(parameters)


def labels_request(parameters: Parameters) -> SeriesRequest:
    """Parse a request for label names or values, limited to the series of `match[]` if it is given."""
    start_ms, end_ms = optional_time(parameters, "start"), optional_time(parameters, "end")
    if start_ms is not None and end_ms is not None and end_ms < start_ms:
        raise InvalidInput('invalid parameter "end": end timestamp must not be before start time')
    texts = parameters.get("match[]") or ()
    if sum(map(len, texts)) > QUERY_CHARACTERS_MAX:
        raise InvalidInput(
            f'invalid parameter "match[]": together they are longer than {QUERY_CHARACTERS_MAX:,} characters'
        )
    return SeriesRequest(
        selectors=tuple(map(_selector, texts)),
        start_ms=start_ms,
        end_ms=end_ms,
        limit=optional_limit(parameters, "limit"),
    )


def metadata_request(parameters: Parameters) -> MetadataRequest:
    """Parse a request for the metadata of one metric or of all."""
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
