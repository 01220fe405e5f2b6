"""Floats as Prometheus prints them: the shortest digits that read back as the same number."""

from __future__ import annotations

import math
from typing import Final

from penstock.timeseries.arrays import Floats

__all__ = ["json_texts", "plain_text"]


_BEYOND: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


def plain_text(value: float) -> str:
    """Without an exponent, however long: as a label's value."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    return _without_exponent(text) if "e" in text else text.removesuffix(".0")


def json_texts(values: Floats) -> list[str]:
    """With an exponent below 1e-6 and from 1e21 on: as a sample's value in an answer."""
    return [_json_text(text) for text in map(repr, values.tolist())]


def _json_text(text: str) -> str:
    if text.endswith(".0"):
        return text[:-2]
    if "e" in text:
        value = abs(float(text))
        return text if value < 1e-6 or value >= 1e21 else _without_exponent(text)
    return _BEYOND.get(text, text)


def _without_exponent(text: str) -> str:
    """`1.5e-07` as `0.00000015`, `1.5e+22` as `15000000000000000000000`."""
    mantissa, _, exponent = text.partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    point = len(whole) + int(exponent)
    digits = whole + fraction
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if point >= len(digits):
        return sign + digits.ljust(point, "0")
    return f"{sign}{digits[:point]}.{digits[point:]}"
