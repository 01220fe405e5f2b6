"""What was delivered on one connection: the leases it holds, and those that ran out without a word."""

from __future__ import annotations

__all__ = ["Holding"]


class Holding:
    """The jobs of one connection of a node. While `lapsed` is not empty nobody knows whether it is alive."""

    __slots__ = ("is_open", "lapsed", "lapsed_ms", "node", "seqs")

    def __init__(self, node: str) -> None:
        self.node = node
        self.is_open = True
        self.seqs: set[int] = set()
        """What was delivered and is neither done nor over."""
        self.lapsed: dict[int, int] = {}
        """The number of the lease of every job that ran out since the worker was last heard of."""
        self.lapsed_ms = 0
        """When the last of them ended."""

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def takes_jobs(self) -> bool:
        """One that is gone takes none, nor does one that let leases run out and was not heard of since."""
        return self.is_open and not self.lapsed

    def lapse(self, seq: int, lease_id: int, until_ms: int) -> None:
        """A lease ended that was neither acked, nacked nor extended in time."""
        if self.is_open:
            self.lapsed[seq] = lease_id
            self.lapsed_ms = max(self.lapsed_ms, until_ms)

    def lost(self, seq: int, lease_id: int) -> bool:
        """Whether the job ran out here, under this lease unless that is 0."""
        lapsed = self.lapsed.get(seq)
        return lapsed is not None and lease_id in (0, lapsed)

    def is_silent(self, now_ms: int, patience_ms: int) -> bool:
        """Whether all that was delivered ran out, and the worker was not heard of for so long since then."""
        return bool(self.lapsed) and not self.seqs and now_ms - self.lapsed_ms > patience_ms
