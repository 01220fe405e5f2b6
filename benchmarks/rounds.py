"""Fair turns: every contender runs once per round, so that noise affects all of them equally."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Plan", "Rates", "interleave", "scratch"]


_PATIENCE_S = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The amount of work of a run, and the directory of its files."""

    quick: bool
    workdir: Path

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Rates:
    """Work per second of each contender, for each round."""

    by_name: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.by_name[name])

    def ratio(self, name: str, ceiling: str) -> float:
        """Return the median over the rounds of the ratio within a round."""
        pairs = zip(self.by_name[name], self.by_name[ceiling], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


def interleave(
    contenders: Mapping[str, Callable[[], float]],
    *,
    work: float,
    rounds: int,
    warmups: int = 1,
    patience_s: float = _PATIENCE_S,
) -> Rates:
    """Run all contenders in turn, A B C A B C …. Each returns the seconds it took for `work` units.

    Warm-up rounds are discarded. The order rotates, so that none always runs after the same neighbour. If the
    machine is too busy for all rounds, the remaining ones are skipped after `patience_s`, except for the
    first two.
    """
    began = time.monotonic()
    names = list(contenders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmups, rounds):
        if turn >= 2 and time.monotonic() - began > patience_s:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = contenders[name]()
            if turn >= 0:
                taken[name].append(work / seconds)
    return Rates(taken)


@contextmanager
def scratch(plan: Plan) -> Iterator[Path]:
    """Create a fresh directory that is removed afterwards."""
    path = Path(tempfile.mkdtemp(dir=plan.workdir))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
