"""The manifest queue as a sequential model for the linearizability checker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from penstock.testing.linearizability import UNKNOWN, Operation, Unknown

__all__ = [
    "Append",
    "Bump",
    "Dequeue",
    "Done",
    "Peek",
    "QueueModel",
    "QueueOperation",
    "QueueRequest",
    "QueueResponse",
    "QueueState",
]


@dataclass(frozen=True, slots=True)
class Append:
    """Append a batch. The response is its sequence. Locations are unique."""

    location: str


@dataclass(frozen=True, slots=True)
class Peek:
    """Read as the consumer of `epoch`, or without a check of the epoch if it is None.

    The response is at most `limit` entries after the sequence `after`, or `Done.FENCED`.
    """

    epoch: int | None = None
    after: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Dequeue:
    """Remove the entries up to and including `through`. The response is `Done.OK` or `Done.FENCED`."""

    epoch: int
    through: int


@dataclass(frozen=True, slots=True)
class Bump:
    """Take over as consumer. The response is the new epoch."""


class Done(Enum):
    """Responses without a value."""

    OK = "ok"
    FENCED = "fenced"


QueueRequest: TypeAlias = Append | Peek | Dequeue | Bump
QueueResponse: TypeAlias = int | tuple[tuple[int, str], ...] | Done
QueueState: TypeAlias = tuple[int, int, tuple[str, ...]]
"""(epoch, sequence of the first entry, locations in order), which also determine the next sequence."""
QueueOperation: TypeAlias = Operation[QueueRequest, QueueResponse]


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts that the responses of a history prove, regardless of its order."""

    location_of: dict[int, str]
    sequence_of: dict[str, int]
    sequence_max: int
    epochs: frozenset[int]


class QueueModel:
    """Dense sequences, first in first out, one epoch at a time.

    `epoch` and `next_sequence` describe the (empty) queue at the beginning of the history.
    """

    def __init__(self, *, epoch: int = 0, next_sequence: int = 0) -> None:
        self._initial: QueueState = (epoch, next_sequence, ())
        self._facts: _Facts | None = None

    def initial(self) -> QueueState:
        return self._initial

    def informed_by(self, history: Sequence[QueueOperation]) -> QueueModel:
        """Return a model whose unknown appends and bumps take only numbers that no other operation has."""
        informed = QueueModel(epoch=self._initial[0], next_sequence=self._initial[1])
        informed._facts = _facts(history)
        return informed

    def step(
        self, state: QueueState, request: QueueRequest, response: QueueResponse | Unknown
    ) -> list[QueueState]:
        if isinstance(request, Append):
            return self._append(state, request, response)
        if isinstance(request, Peek):
            return [state] if response in (UNKNOWN, _peeked(state, request)) else []
        if isinstance(request, Dequeue):
            return _dequeue(state, request, response)
        return self._bump(state, response)

    def is_read(self, request: QueueRequest, response: QueueResponse | Unknown) -> bool:
        return isinstance(request, Peek) or response is Done.FENCED

    def _append(
        self, state: QueueState, request: Append, response: QueueResponse | Unknown
    ) -> list[QueueState]:
        epoch, first, locations = state
        sequence = first + len(locations)
        if response is UNKNOWN:
            possible = self._facts is None or _append_is_possible(self._facts, sequence, request.location)
        else:
            possible = response == sequence
        return [(epoch, first, (*locations, request.location))] if possible else []

    def _bump(self, state: QueueState, response: QueueResponse | Unknown) -> list[QueueState]:
        epoch = state[0] + 1
        if response is UNKNOWN:
            possible = self._facts is None or epoch not in self._facts.epochs
        else:
            possible = response == epoch
        return [(epoch, *state[1:])] if possible else []


def _peeked(state: QueueState, request: Peek) -> QueueResponse:
    epoch, first, locations = state
    if request.epoch is not None and request.epoch != epoch:
        return Done.FENCED
    skipped = 0 if request.after is None else max(0, request.after + 1 - first)
    stop = None if request.limit is None else skipped + request.limit
    return tuple(enumerate(locations[skipped:stop], first + skipped))


def _dequeue(state: QueueState, request: Dequeue, response: QueueResponse | Unknown) -> list[QueueState]:
    epoch, first, locations = state
    if request.epoch != epoch:
        return [state] if response in (UNKNOWN, Done.FENCED) else []
    if response not in (UNKNOWN, Done.OK):
        return []
    dropped = min(len(locations), max(0, request.through + 1 - first))
    return [(epoch, first + dropped, locations[dropped:])]


def _append_is_possible(facts: _Facts, sequence: int, location: str) -> bool:
    if location in facts.sequence_of:
        return facts.sequence_of[location] == sequence
    # After the last observed sequence, an unobserved append explains nothing.
    return sequence < facts.sequence_max and sequence not in facts.location_of


def _facts(history: Sequence[QueueOperation]) -> _Facts:
    location_of = dict(_seen_entries(history))
    return _Facts(
        location_of=location_of,
        sequence_of={location: sequence for sequence, location in location_of.items()},
        sequence_max=max(location_of, default=-1),
        epochs=frozenset(
            operation.response
            for operation in history
            if isinstance(operation.request, Bump) and isinstance(operation.response, int)
        ),
    )


def _seen_entries(history: Sequence[QueueOperation]) -> Iterator[tuple[int, str]]:
    for operation in history:
        if isinstance(operation.request, Append) and isinstance(operation.response, int):
            yield operation.response, operation.request.location
        elif isinstance(operation.response, tuple):
            yield from operation.response
