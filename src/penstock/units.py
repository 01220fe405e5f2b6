"""Durations and sizes in readable notation, and back.

A duration is a number of seconds, a `timedelta`, or text with a unit (`"100ms"`). A size is a whole
number of bytes or text (`"64MiB"`, `"10MB"`, `"512"`). Anything else raises `ConfigError`.

A settings class converts them once, in its constructor. Its fields then hold numbers. `size_of` and
`seconds_of` give such a number a second name that includes the unit and has a plain type:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class SegmentConfig:
        target_size: SizeLike = "32MB"
        target_bytes = size_of("target_size")

        def __post_init__(self) -> None:
            convert_units(self)
"""

from __future__ import annotations

import datetime
import math
import operator
import re
import typing
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

from penstock.errors import ConfigError

__all__ = [
    "DurationLike",
    "SizeLike",
    "convert_units",
    "duration_text",
    "format_count",
    "format_duration",
    "format_size",
    "parse_duration",
    "parse_size",
    "seconds_of",
    "size_of",
]

N_co = TypeVar("N_co", covariant=True)

DurationLike: TypeAlias = float | int | str | datetime.timedelta
SizeLike: TypeAlias = int | str

# Exact fractions, so that "1.1MB" is 1100000 bytes and not one less.
_SECONDS: Final = {
    "us": Fraction(1, 1_000_000),
    "µs": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_BYTES: Final = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_NUMBER_AND_UNIT: Final = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-zµ]{0,3})", re.ASCII)

_DURATION_EXAMPLES: Final = (
    'write a number of seconds, or text with a unit such as "100ms", "1.5s", "5m", "1h"'
)
_SIZE_EXAMPLES: Final = 'write a whole number of bytes, or text such as "64MiB", "1GiB", "10MB"'


def parse_duration(value: DurationLike) -> float:
    """Return `value` in seconds.

    Raise `ConfigError` if it is negative, not finite, or text without a unit.
    """
    if isinstance(value, datetime.timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        seconds = _duration_of_text(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = _finite(value)
    else:
        raise ConfigError(f"{value!r} is not a duration: {_DURATION_EXAMPLES}")
    if seconds < 0:
        raise ConfigError(f"{value!r} is not a duration: it is negative")
    return seconds


def parse_size(value: SizeLike) -> int:
    """Return `value` in bytes. Raise `ConfigError` if it is negative, fractional, or in an unknown unit."""
    if isinstance(value, str):
        return _size_of_text(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a size: {_SIZE_EXAMPLES}")
    if value < 0:
        raise ConfigError(f"{value!r} is not a size: it is negative")
    return value


class _Number(Generic[N_co]):
    """The type of `size_of` and `seconds_of` for type checkers."""

    def __get__(self, settings: object, owner: type | None = None) -> N_co: ...  # type: ignore[empty-body]


class _Unit(property):
    """A property that returns a field, with the function that converts the field to a number."""

    def __init__(self, field: str, parse: Callable[[Any], float], *, optional: bool = False) -> None:
        super().__init__(operator.attrgetter(field))
        self.field = field
        self.parse = parse
        self.optional = optional


@typing.overload
def size_of(field: str) -> _Number[int]: ...
@typing.overload
def size_of(field: str, *, optional: Literal[True]) -> _Number[int | None]: ...
def size_of(field: str, *, optional: bool = False) -> object:
    """Declare a property: the size in `field` in bytes, typed `int`; `optional` allows None."""
    return _Unit(field, parse_size, optional=optional)


@typing.overload
def seconds_of(field: str) -> _Number[float]: ...
@typing.overload
def seconds_of(field: str, *, optional: Literal[True]) -> _Number[float | None]: ...
def seconds_of(field: str, *, optional: bool = False) -> object:
    """Declare a property: the duration in `field` in seconds, typed `float`; `optional` allows None."""
    return _Unit(field, parse_duration, optional=optional)


def convert_units(settings: object) -> None:
    """Convert every size and duration declared in `settings` to a number, in its own field.

    Call it once, in `__post_init__`. Raise `ConfigError` naming the field.
    """
    cls: type = type(settings)
    for unit in _units(cls):
        value = getattr(settings, unit.field)
        if value is None and unit.optional:
            continue
        try:
            object.__setattr__(settings, unit.field, unit.parse(value))
        except ConfigError as error:
            raise ConfigError(f"{unit.field}: {error}") from error


@cache
def _units(cls: type) -> list[_Unit]:
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    return [member for member in members.values() if isinstance(member, _Unit)]


def duration_text(duration: DurationLike) -> str:
    """Return `duration` as text that `parse_duration` accepts, for a file or a command line."""
    return duration if isinstance(duration, str) else f"{parse_duration(duration):.6f}s"


def format_duration(seconds: float) -> str:
    """Format a duration for display: three significant digits, in the largest unit that gives at least 1."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    units = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"), (1e-3, "ms"))
    for scale, unit in units:
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)}{unit}"
    return f"{_three_digits(seconds / 1e-6)}us" if seconds else "0s"


def format_size(size_bytes: int) -> str:
    """Format a size for display: three significant digits, in binary units (`"1.5 MiB"`)."""
    return _scaled(size_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def format_count(count: int) -> str:
    """Format a count for display: exact below a million (`"12,345"`), then `"1.23M"`, `"4.5G"`."""
    if abs(count) < 1_000_000:
        return f"{count:,}"
    return _scaled(count, 1000, ("", "k", "M", "G", "T"))


def _duration_of_text(text: str) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration: {_DURATION_EXAMPLES}")
    number, unit = match.groups()
    if not unit:
        raise ConfigError(f'{text!r} is not a duration: it has no unit; write "{number}s" for seconds')
    scale = _SECONDS.get(unit)
    if scale is None:
        raise ConfigError(f"{text!r} is not a duration: unknown unit {unit!r}; use us, ms, s, m, h or d")
    return float(Fraction(number) * scale)


def _size_of_text(text: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: {_SIZE_EXAMPLES}")
    number, unit = match.groups()
    scale = _BYTES.get(unit.lower())
    if scale is None:
        raise ConfigError(f"{text!r} is not a size: unknown unit {unit!r}; {_SIZE_EXAMPLES}")
    size = Fraction(number) * scale
    if size.denominator != 1:
        raise ConfigError(f"{text!r} is not a size: it is not a whole number of bytes")
    return int(size)


def _finite(value: float) -> float:
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise ConfigError(f"{value!r} is not a duration: it is not finite; {_DURATION_EXAMPLES}")
    return seconds


def _scaled(value: int, base: int, units: tuple[str, ...]) -> str:
    if abs(value) < base:
        return f"{value}{units[0]}"
    scaled = float(value)
    unit = units[0]
    for unit in units:
        # 999.5 would print as "1000" of this unit: use the next one.
        if abs(scaled) < base - 0.5:
            break
        if unit != units[-1]:
            scaled /= base
    return f"{_three_digits(scaled)}{unit}"


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
