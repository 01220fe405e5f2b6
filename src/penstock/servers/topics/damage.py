"""Damage as a reader is told of it: with the name of the topic, which the files do not know."""

from __future__ import annotations

from penstock.topics import Damaged

__all__ = ["damaged_in"]


def damaged_in(topic: str, error: Damaged) -> Damaged:
    """The same error, its message and its detail naming the topic."""
    return Damaged(f'topic "{topic}": {error}', {"topic": topic, **(error.detail or {})})
