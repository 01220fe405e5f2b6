"""Fault plans, which decide which calls of a store fail, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["DEFAULT_RATES", "FAULTS_OF", "FaultKind", "FaultPlan", "StoreCall", "StoreOp"]

StoreOp: TypeAlias = Literal[
    "get", "get_if_changed", "put", "put_if_absent", "put_if_match", "head", "list", "delete_many"
]


class FaultKind(StrEnum):
    """The faults of a call.

    A "lost" error is `OutcomeUnknown` for a conditional write. For other calls it is `Unavailable`, because
    repeating a read, a plain put or a delete is harmless.
    """

    REFUSED = "refused"
    """Definitely not applied. The caller gets `Unavailable`, even for a conditional write."""
    FAILED_BEFORE = "failed_before"
    """The request never arrived. The caller gets a lost error."""
    APPLIED_THEN_LOST = "applied_then_lost"
    """Applied, but the response is lost. The caller gets a lost error."""
    LATE_LANDING = "late_landing"
    """The caller gets a lost error immediately. The write reaches the store later and may win or lose."""
    OWN_CONFLICT = "own_conflict"
    """Applied, but the caller gets `Conflict`, because a hidden retry found the caller's own write."""
    NOT_DECIDED = "not_decided"
    """Not applied. The caller gets `Conflict`: the store's 409 for two writes at the same moment."""
    THROTTLED = "throttled"
    """Not applied, 429 or 503. The caller gets a lost error."""
    STALL_BEFORE = "stall_before"
    """A long delay, then the call is applied and returns."""
    STALL_AFTER = "stall_after"
    """The call is applied, then returns after a long delay."""
    TRUNCATED = "truncated"
    """A read returns only the first part of the bytes."""
    CUT_SHORT = "cut_short"
    """A read is interrupted and the client notices. The caller gets `Unavailable`."""
    STALE_LIST = "stale_list"
    """An outdated listing: it omits recent additions and still includes recent deletions."""


_ANY = (FaultKind.FAILED_BEFORE, FaultKind.THROTTLED, FaultKind.STALL_BEFORE, FaultKind.STALL_AFTER)
_READ = (*_ANY, FaultKind.TRUNCATED, FaultKind.CUT_SHORT)
_WRITE = (*_ANY, FaultKind.APPLIED_THEN_LOST, FaultKind.LATE_LANDING)
_CONDITIONAL = (*_WRITE, FaultKind.REFUSED, FaultKind.OWN_CONFLICT, FaultKind.NOT_DECIDED)

FAULTS_OF: Mapping[StoreOp, tuple[FaultKind, ...]] = MappingProxyType(
    {
        "get": _READ,
        "get_if_changed": _READ,
        "put": _WRITE,
        "put_if_absent": _CONDITIONAL,
        "put_if_match": _CONDITIONAL,
        "head": _ANY,
        "list": (*_ANY, FaultKind.STALE_LIST),
        "delete_many": _WRITE,
    }
)
"""The faults that apply to each call: the cases of a sweep."""

DEFAULT_RATES: Mapping[FaultKind, float] = MappingProxyType(
    {
        FaultKind.REFUSED: 0.01,
        FaultKind.FAILED_BEFORE: 0.02,
        FaultKind.APPLIED_THEN_LOST: 0.03,
        FaultKind.LATE_LANDING: 0.02,
        FaultKind.OWN_CONFLICT: 0.01,
        FaultKind.NOT_DECIDED: 0.01,
        FaultKind.THROTTLED: 0.02,
        FaultKind.STALL_BEFORE: 0.002,
        FaultKind.STALL_AFTER: 0.002,
        FaultKind.CUT_SHORT: 0.01,
        FaultKind.STALE_LIST: 0.05,
    }
)
"""Rates per call under bad conditions, without `TRUNCATED`, because the usual clients check the length."""


class StoreCall(NamedTuple):
    """A call in the plan's log. `key` is the prefix of a listing, or the first key of a delete."""

    number: int
    op: StoreOp
    key: str


@dataclass(slots=True, kw_only=True)
class FaultPlan:
    """Decides the fault of every call, and logs the calls.

    One plan may serve several `FaultyStore`s. `calls` is then their common order. Each range is (minimum,
    maximum) in seconds, drawn uniformly. `cancelled_lands` is the probability that a write still reaches the
    store if its caller is cancelled while the write is in progress.
    """

    rates: Mapping[FaultKind, float] = field(default_factory=dict)
    script: Mapping[int, FaultKind] = field(default_factory=dict)
    latency_s: tuple[float, float] = (0.0, 0.0)
    stall_s: tuple[float, float] = (60.0, 7200.0)
    late_s: tuple[float, float] = (0.01, 30.0)
    stale_window_s: float = 60.0
    cancelled_lands: float = 0.0
    calls: list[StoreCall] = field(default_factory=list, init=False)
    injected: Counter[FaultKind] = field(default_factory=Counter, init=False)
    is_quiet: bool = field(default=False, init=False)

    @classmethod
    def none(cls) -> FaultPlan:
        """Create a plan without faults, which only logs the calls."""
        return cls()

    @classmethod
    def random(
        cls,
        rates: Mapping[FaultKind, float] = DEFAULT_RATES,
        *,
        latency_s: tuple[float, float] = (0.002, 0.05),
        stall_s: tuple[float, float] = (60.0, 7200.0),
        late_s: tuple[float, float] = (0.01, 30.0),
        cancelled_lands: float = 0.5,
    ) -> FaultPlan:
        """Create a plan that injects each applicable fault into every call with the given probability.

        Raise `ValueError` if the rates are not probabilities.
        """
        if any(rate < 0 for rate in rates.values()) or sum(rates.values()) > 1:
            raise ValueError(f"fault rates must be at least 0 and add up to at most 1: {dict(rates)}")
        return cls(
            rates=rates, latency_s=latency_s, stall_s=stall_s, late_s=late_s, cancelled_lands=cancelled_lands
        )

    @classmethod
    def at(cls, call_index: int, kind: FaultKind) -> FaultPlan:
        """Create a plan for sweeps: one fault at the call with this index (from 0), without latency."""
        return cls(script={call_index: kind})

    def quiet(self) -> None:
        """Stop injecting faults. Latency stays, and late writes still reach the store."""
        self.is_quiet = True

    def resume(self) -> None:
        """Undo `quiet`."""
        self.is_quiet = False

    def may(self, kind: FaultKind) -> bool:
        """Return whether this plan can ever inject `kind`."""
        return self.rates.get(kind, 0.0) > 0 or kind in self.script.values()

    def draw(self, op: StoreOp, key: str, rng: Random) -> FaultKind | None:
        """Log the call and decide its fault. A scripted kind that does not apply to `op` is not injected."""
        index = len(self.calls)
        self.calls.append(StoreCall(index, op, key))
        if self.is_quiet:
            return None
        kind = self.script.get(index) or self._draw_random(op, rng)
        if kind is None or kind not in FAULTS_OF[op]:
            return None
        self.injected[kind] += 1
        return kind

    def _draw_random(self, op: StoreOp, rng: Random) -> FaultKind | None:
        if not self.rates:
            return None
        point = rng.random()
        for kind in FAULTS_OF[op]:
            point -= self.rates.get(kind, 0.0)
            if point < 0:
                return kind
        return None
