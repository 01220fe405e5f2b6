"""Who of several claimers gets which jobs."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["deal"]


def deal(seqs: Sequence[int], wants: Sequence[int]) -> list[list[int]]:
    """Jobs to claimers in turns, none more than it wants; every hand ascends if `seqs` do."""
    if len(wants) == 1:
        return [list(seqs[: wants[0]])]
    hands: list[list[int]] = [[] for _ in wants]
    left = list(wants)
    turn = [place for place, want in enumerate(wants) if want]
    at = 0
    while at < len(seqs) and turn:
        for place in turn:
            if at == len(seqs):
                break
            hands[place].append(seqs[at])
            left[place] -= 1
            at += 1
        turn = [place for place in turn if left[place]]
    return hands
