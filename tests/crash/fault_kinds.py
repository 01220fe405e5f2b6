"""The kinds of faults that a sweep over every file call takes, and which of them wait for `make long`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

from penstock.testing.disk import DiskFault

__all__ = ["fault_name", "spread"]

_TELLING = frozenset({DiskFault.CRASH_AFTER, DiskFault.FAIL_ONCE})
"""A power cut behind a call, and a call that fails once: what finds most of what there is to find."""


def fault_name(kind: DiskFault) -> str:
    """How a test with this fault is called."""
    return kind.name.lower()


def spread(kinds: Iterable[DiskFault]) -> list[ParameterSet]:
    """Every kind; a sweep of a whole engine takes many seconds, so all but the telling ones are `long`."""
    return [pytest.param(kind, marks=() if kind in _TELLING else pytest.mark.long) for kind in kinds]
