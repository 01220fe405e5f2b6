"""Findings of a check on queues, data directories or pipelines, with their severity."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Finding", "Severity", "problems_in"]


class Severity(enum.StrEnum):
    """Whether an operator must act."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact found by a check: its subject, a description, and advice."""

    severity: Severity
    subject: str
    text: str
    advice: str = ""


F = TypeVar("F", bound=Finding)


def problems_in(findings: Iterable[F]) -> list[F]:
    """Return the findings that need action."""
    return [finding for finding in findings if finding.severity is Severity.PROBLEM]
