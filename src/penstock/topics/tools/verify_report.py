"""What a check of a data directory found."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Finding", "Severity", "VerifyReport"]


class Severity(StrEnum):
    """Damage, or something worth knowing."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A file, perhaps a range of its bytes, and what is wrong; `path` is relative to the data directory."""

    severity: Severity
    path: str
    text: str
    start: int | None = None
    end: int | None = None
    topic: str | None = None
    first_seq: int | None = None
    last_seq: int | None = None

    def __str__(self) -> str:
        where = "" if self.start is None else f", bytes {self.start} to {self.end}"
        return f"{self.path}{where}: {self.text}"


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What was looked at and what was found."""

    directory: str
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    topics: int = 0
    stored_records: int = 0
    """Records in segments that were read, deleted ones included."""
    log_frames: int = 0

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is Severity.PROBLEM]

    def count(self, size: int) -> None:
        """One more file was read, or as much of it as counts."""
        self.files += 1
        self.bytes += size
