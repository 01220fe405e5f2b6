"""Small changes to valid bytes, as made by hostile or broken storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hypothesis import strategies as st

__all__ = ["Change", "changes", "mutated"]

Change: TypeAlias = tuple[str, int, int]
"""A change: its kind, position and value."""


def changes(kinds: Sequence[str], values: Sequence[int], *, most: int) -> st.SearchStrategy[list[Change]]:
    """Return a strategy of one to `most` changes of these kinds, with a byte or one of the values."""
    value = st.one_of(st.integers(0, 255), st.sampled_from(values))
    change = st.tuples(st.sampled_from(kinds), st.integers(0, 2**20), value)
    return st.lists(change, min_size=1, max_size=most)


def mutated(raw: bytes, todo: list[Change]) -> bytes:
    """Apply the changes to the bytes, in order."""
    data = bytearray(raw)
    for kind, place, value in todo:
        at = place % (len(data) + 1)
        match kind:
            case "flip" if at < len(data):
                data[at] ^= 1 << (value % 8)
            case "set" if at < len(data):
                data[at] = value % 256
            case "cut":
                del data[at : at + 1 + value % 32]
            case "insert":
                data[at:at] = bytes([value % 256]) * (1 + value % 8)
            case "double":
                data[at:at] = data[at : at + 64]
            case "u32":
                data[at : at + 4] = (value % 2**32).to_bytes(4, "little")
    return bytes(data)
