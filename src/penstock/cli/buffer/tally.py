"""What became of the records that were handed to a producer: counted from the watchers, nothing assumed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock.buffer import WriteHandle
from penstock.errors import OutcomeUnknown, PenstockError

__all__ = ["Tally"]


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of accepted, durable and failed records, and where the durable ones stand."""

    accepted: int = 0
    accepted_bytes: int = 0
    durable: int = 0
    durable_bytes: int = 0
    failed: int = 0
    unknown: int = 0
    """Failed in a way that leaves open whether they are in the queue."""
    first_failed: int | None = None
    """Number, in the input, of the first record that is not known to be durable."""
    error: PenstockError | None = None
    sequences: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Folder of the batches to the lowest and highest sequence in it: one folder per shard."""
    _pending: deque[tuple[WriteHandle, int, int, int]] = field(default_factory=deque)

    def accept(self, handle: WriteHandle, count: int, size: int, first: int | None = None) -> None:
        """A call was taken in; `first` is the number of its first record in the input."""
        number = self.accepted if first is None else first
        self._pending.append((handle, number, count, size))
        self.accepted += count
        self.accepted_bytes += size

    def settle(self) -> None:
        """Take note of every call whose outcome is known by now."""
        while self._pending and self._pending[0][0].watcher.result() is not None:
            self._note(*self._pending.popleft())

    def settle_all(self) -> None:
        """The same for calls in any order; those without an outcome stay pending."""
        waiting = list(self._pending)
        self._pending.clear()
        for call in waiting:
            if call[0].watcher.result() is None:
                self._pending.append(call)
            else:
                self._note(*call)

    def _note(self, handle: WriteHandle, first: int, count: int, size: int) -> None:
        outcome = handle.watcher.result()
        assert outcome is not None
        if outcome.error is not None:
            self.failed += count
            self.unknown += count if isinstance(outcome.error, OutcomeUnknown) else 0
            self.first_failed = first if self.first_failed is None else min(self.first_failed, first)
            # The one that asks for most care is the one to tell.
            if self.error is None or isinstance(outcome.error, OutcomeUnknown):
                self.error = outcome.error
            return
        self.durable += count
        self.durable_bytes += size
        assert outcome.location is not None
        assert outcome.sequence is not None
        folder = outcome.location.rpartition("/")[0]
        low, high = self.sequences.get(folder, (outcome.sequence, outcome.sequence))
        self.sequences[folder] = min(low, outcome.sequence), max(high, outcome.sequence)

    @property
    def complete(self) -> bool:
        """Every accepted record is durable."""
        return self.durable == self.accepted
