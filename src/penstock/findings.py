"""The result of a check: findings about queues, data directories and pipelines, and how severe they are."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Finding", "Severity", "problems_in"]


class Severity(enum.StrEnum):
    """Whether an operator has to act."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact that a check found: where, what, and what to do about it."""

    severity: Severity
    subject: str
    text: str
    advice: str = ""


F = TypeVar("F", bound=Finding)


def problems_in(findings: Iterable[F]) -> list[F]:
    """Return the findings that need action."""
    return [finding for finding in findings if finding.severity is Severity.PROBLEM]
