"""Parameters as they stand in a query string or a form: times, durations, numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, TypeAlias

from penstock.errors import InvalidInput

__all__ = [
    "Parameters",
    "optional_limit",
    "optional_step",
    "optional_time",
    "parse_step",
    "parse_time",
    "required",
    "single",
]

Parameters: TypeAlias = Mapping[str, Sequence[str]]
"""Each name with all of its values; where one is expected the first counts."""

_TIME_MAX_S: Final = 2**53 / 1000
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_RFC3339: Final = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})", re.ASCII
)
# Units from the largest to the smallest, each at most once: what the query language calls a duration,
# which is more than a setting may be.
_DURATION: Final = re.compile(
    "".join(rf"(?:([0-9]{{1,12}}){unit})?" for unit in ("y", "w", "d", "h", "m(?!s)", "s", "ms"))
)
_UNITS_MS: Final = (31_536_000_000, 604_800_000, 86_400_000, 3_600_000, 60_000, 1000, 1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def single(parameters: Parameters, name: str) -> str | None:
    """The first value, or None if there is none or it is empty."""
    values = parameters.get(name) or ()
    return values[0] or None if values else None


def required(parameters: Parameters, name: str) -> str:
    """The first value. Raises `InvalidInput` if there is none."""
    value = single(parameters, name)
    if value is None:
        raise InvalidInput(f'invalid parameter "{name}": it is missing or empty')
    return value


def optional_time(parameters: Parameters, name: str) -> int | None:
    """Milliseconds, or None. Raises `InvalidInput` naming the parameter."""
    value = single(parameters, name)
    return None if value is None else _named(name, parse_time, value)


def optional_step(parameters: Parameters, name: str) -> int | None:
    """Milliseconds of a duration, or None. Raises `InvalidInput` naming the parameter."""
    value = single(parameters, name)
    return None if value is None else _named(name, parse_step, value)


def optional_limit(parameters: Parameters, name: str) -> int | None:
    """A count, or None if it is not given or 0. Raises `InvalidInput` if it is negative or no number."""
    value = single(parameters, name)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise InvalidInput(f'invalid parameter "{name}": {value!r} is not a number of results')
    return int(value) or None


def parse_time(text: str) -> int:
    """Milliseconds since the Unix epoch of seconds as a float, or of an RFC 3339 time.

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
    """Milliseconds of seconds as a float, or of a duration such as `1m30s`.

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
