from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.units import (
    DurationLike,
    SizeLike,
    convert_units,
    duration_text,
    format_count,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    seconds_of,
    size_of,
)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("100ms", 0.1),
        ("1.5s", 1.5),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("2d", 172800.0),
        ("250us", 0.00025),
        ("250µs", 0.00025),
        (" 10 s ", 10.0),
        ("0s", 0.0),
        (0, 0.0),
        (3, 3.0),
        (0.25, 0.25),
        (datetime.timedelta(milliseconds=20), 0.02),
    ],
)
def test_a_duration_is_read_in_seconds(value: object, seconds: float) -> None:
    parsed = parse_duration(value)  # type: ignore[arg-type]
    assert parsed == seconds
    assert type(parsed) is float


@pytest.mark.parametrize(
    "value",
    ["", "s", "1.s", "-1s", "1e3s", "1 fortnight", "1M", "nan", "inf", "\u0661s", "1s 2s"]
    + [-1, -0.5, float("nan"), float("inf"), 10**400, True, None, [], b"1s", datetime.timedelta(-1)],
)
def test_a_wrong_duration_is_named_in_the_error(value: object) -> None:
    with pytest.raises(ConfigError, match="is not a duration") as caught:
        parse_duration(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


def test_a_duration_without_a_unit_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"'100' is not a duration: it has no unit; write \"100s\""):
        parse_duration("100")


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("64MiB", 64 * 1024**2),
        ("1GiB", 1024**3),
        ("10MB", 10_000_000),
        ("1.1MB", 1_100_000),
        ("0.5KiB", 512),
        ("64 KiB", 65536),
        ("64kib", 65536),
        ("512", 512),
        ("512B", 512),
        (0, 0),
        (4096, 4096),
    ],
)
def test_a_size_is_read_in_bytes(value: object, size: int) -> None:
    parsed = parse_size(value)  # type: ignore[arg-type]
    assert parsed == size
    assert type(parsed) is int


@pytest.mark.parametrize(
    "value", ["", "MiB", "-1", "1.5", "0.3KiB", "1e3", "5 bytes", "5XB"] + [-1, 1.5, True, None]
)
def test_a_wrong_size_is_named_in_the_error(value: object) -> None:
    with pytest.raises(ConfigError, match="is not a size") as caught:
        parse_size(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


@given(st.floats(0, 1e8))
def test_a_formatted_duration_reads_back_within_its_digits(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.006, abs=1e-8)


@given(st.integers(0, 2**60))
def test_a_formatted_size_reads_back_within_its_digits(size: int) -> None:
    text = format_size(size).removesuffix(" B")
    number, _, unit = text.partition(" ")
    scale = parse_size(f"1{unit}")
    assert float(number) * scale == pytest.approx(size, rel=0.006)


@given(st.integers(0, 2**80), st.sampled_from(["", "B", "kB", "KiB", "MB", "MiB", "GB", "GiB", "TiB", "PiB"]))
def test_a_whole_number_of_units_is_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * parse_size(f"1{unit}")


@given(st.text(max_size=12))
def test_any_text_parses_or_is_a_config_error(text: str) -> None:
    for parse in (parse_duration, parse_size):
        try:
            assert parse(text) >= 0
        except ConfigError:
            pass


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.00025, "250us"),
        (0.0123, "12.3ms"),
        (1.5, "1.5s"),
        (90, "1.5m"),
        (7200, "2h"),
        (-1, "-1s"),
    ]
    + [(172800, "2d")],
)
def test_durations_are_formatted_briefly(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1 MiB"),
        (-2048, "-2 KiB"),
    ]
    + [(64 * 1024**2, "64 MiB"), (1024**6, "1024 PiB")],
)
def test_sizes_are_formatted_in_binary_units(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999_999, "999,999"), (1_000_000, "1M"), (1_234_567, "1.23M"), (5_000_000_000, "5G")],
)
def test_counts_are_exact_below_a_million(count: int, text: str) -> None:
    assert format_count(count) == text


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    target_size: SizeLike = "32MB"
    max_open: DurationLike = "5s"
    timeout: DurationLike | None = None

    target_bytes = size_of("target_size")
    max_open_s = seconds_of("max_open")
    timeout_s = seconds_of("timeout", optional=True)

    def __post_init__(self) -> None:
        convert_units(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallSegment(Segment):
    target_size: SizeLike = "1MB"
    wait: DurationLike = "1ms"

    wait_s = seconds_of("wait")


def test_fields_of_settings_become_numbers_with_a_second_name() -> None:
    settings = Segment(max_open=datetime.timedelta(milliseconds=250))
    assert (settings.target_size, settings.target_bytes) == (32_000_000, 32_000_000)
    assert (settings.max_open, settings.max_open_s) == (0.25, 0.25)
    assert settings.timeout_s is None
    assert Segment(timeout="2m").timeout_s == 120.0


def test_settings_are_equal_for_any_notation_of_a_number() -> None:
    assert Segment(target_size="32MB", max_open="5s") == Segment(target_size=32_000_000, max_open=5)
    assert dataclasses.replace(Segment(), max_open="1s").max_open_s == 1.0


def test_settings_inherit_the_conversion() -> None:
    settings = SmallSegment()
    assert (settings.target_bytes, settings.max_open_s, settings.wait_s) == (1_000_000, 5.0, 0.001)
    assert [field.name for field in dataclasses.fields(settings)] == [
        "target_size",
        "max_open",
        "timeout",
        "wait",
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target_size": "big"}, "target_size: 'big' is not a size"),
        ({"max_open": "5"}, "max_open: '5' is not a duration"),
        ({"max_open": None}, "max_open: None is not a duration"),
        ({"timeout": -1}, "timeout: -1 is not a duration"),
    ],
)
def test_a_wrong_field_is_named_in_the_error(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Segment(**wrong)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


@given(st.floats(0, 10**9) | st.integers(0, 10**9) | st.timedeltas(min_value=datetime.timedelta(0)))
def test_a_duration_written_as_text_is_read_to_the_microsecond(duration: DurationLike) -> None:
    written = parse_duration(duration_text(duration))
    assert written == pytest.approx(parse_duration(duration), abs=1e-6)
    assert duration_text("100ms") == "100ms"
