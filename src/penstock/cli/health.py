"""One line of a health report."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Check", "Status", "fail", "ok", "warn"]


class Status(enum.Enum):
    """How it looks: fine, worth knowing, or in the way."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was looked at, what was found and, unless it is fine, what to do."""

    status: Status
    name: str
    text: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """For JSON."""
        return {"status": self.status.value, "name": self.name, "text": self.text, "advice": self.advice}


def ok(name: str, text: str) -> Check:
    return Check(status=Status.OK, name=name, text=text)


def warn(name: str, text: str, advice: str) -> Check:
    return Check(status=Status.WARN, name=name, text=text, advice=advice)


def fail(name: str, text: str, advice: str) -> Check:
    return Check(status=Status.FAIL, name=name, text=text, advice=advice)
