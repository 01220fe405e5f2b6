"""Words that go with numbers."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str) -> str:
    """`1 record`, `2,000 records`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
