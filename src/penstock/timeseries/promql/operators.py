"""Arithmetic and comparison between numbers, over arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from penstock.timeseries.arrays import Floats, Mask

__all__ = ["COMPARISONS", "SET_OPERATORS", "arithmetic", "compare"]

COMPARISONS: Final[dict[str, Callable[[Floats, Floats], Mask]]] = {
    "==": np.equal,
    "!=": np.not_equal,
    ">": np.greater,
    "<": np.less,
    ">=": np.greater_equal,
    "<=": np.less_equal,
}
SET_OPERATORS: Final = frozenset({"and", "or", "unless"})

_ARITHMETIC: Final[dict[str, Callable[[Floats, Floats], Floats]]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "%": np.fmod,  # the sign is the dividend's
    "^": np.power,
    "atan2": np.arctan2,
}


def arithmetic(op: str, left: Floats, right: Floats) -> Floats:
    """As IEEE 754 has it: a division by zero is an infinity or NaN."""
    with np.errstate(all="ignore"):
        return _ARITHMETIC[op](left, right)


def compare(op: str, left: Floats, right: Floats) -> Mask:
    """Where the comparison holds; with NaN only `!=` does."""
    with np.errstate(invalid="ignore"):
        return COMPARISONS[op](left, right)
