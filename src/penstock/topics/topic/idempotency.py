"""Idempotency keys of recent writes, with their outcomes."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Final, NamedTuple

KEYS_MAX: Final = 100_000
"""The number of keys kept per topic. The oldest keys are dropped beyond it, even within the window."""
_SHORT: Final = 32


class Outcome(NamedTuple):
    """The outcome of the first write with a key."""

    first_seq: int
    last_seq: int
    head_seq: int
    created_ms: int


class WriteWindow:
    """The keys of one topic, oldest first. A key lives `window_ms` after its first write, inclusive."""

    __slots__ = ("_keys_max", "_outcomes")

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._outcomes: OrderedDict[bytes, Outcome] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outcomes)

    def find(self, key: str, *, now_ms: int, window_ms: int) -> Outcome | None:
        """Return the outcome of the first write with this key, or None if the key is new or has expired."""
        self.expire(now_ms, window_ms)
        outcome = self._outcomes.get(_short(key))
        # The clock may have been set back, so the order of the keys does not prove their age.
        return outcome if outcome is not None and now_ms - outcome.created_ms <= window_ms else None

    def add(self, key: str, outcome: Outcome) -> None:
        """Store the outcome of a committed write."""
        name = _short(key)
        self._outcomes[name] = outcome
        self._outcomes.move_to_end(name)
        if len(self._outcomes) > self._keys_max:
            self._outcomes.popitem(last=False)

    def expire(self, now_ms: int, window_ms: int) -> None:
        """Remove the keys that are older than the window."""
        outcomes = self._outcomes
        while outcomes:
            name = next(iter(outcomes))
            if now_ms - outcomes[name].created_ms <= window_ms:
                return
            del outcomes[name]

    def clear(self) -> None:
        """Remove all keys."""
        self._outcomes.clear()


def _short(key: str) -> bytes:
    """Return the key, or its digest if that is shorter. The lengths differ, so the two cannot collide."""
    name = key.encode("utf-8", "surrogatepass")
    return name if len(name) < _SHORT else blake2b(name, digest_size=_SHORT).digest()
