"""A linearizability checker, which searches an order of a recorded history that a sequential model allows.

The algorithm is that of Wing & Gong with memoisation.

An operation takes effect at one instant between its call and its return. An operation with an unknown outcome
takes effect at some instant after its call, or never. A history must not include operations that definitely
failed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

__all__ = ["UNKNOWN", "GuidedModel", "History", "Model", "Operation", "Unknown", "Verdict", "check"]


class _UnknownType(Enum):
    UNKNOWN = "unknown"

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _UnknownType.UNKNOWN
"""The response of an operation with an unknown outcome."""
Unknown: TypeAlias = Literal[_UnknownType.UNKNOWN]

_Req = TypeVar("_Req")
_Res = TypeVar("_Res")
_State = TypeVar("_State", bound=Hashable)
_Req_contra = TypeVar("_Req_contra", contravariant=True)
_Res_contra = TypeVar("_Res_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[_Req, _Res]):
    """One call of one process. `return_at` is None exactly when the response is `UNKNOWN`."""

    process: str
    call_at: float
    return_at: float | None
    request: _Req
    response: _Res | Unknown

    def __post_init__(self) -> None:
        if (self.return_at is None) != (self.response is UNKNOWN):
            raise ValueError("an operation has a return time exactly when its response is known")
        if self.return_at is not None and self.return_at < self.call_at:
            raise ValueError(f"an operation returned at {self.return_at}, before its call at {self.call_at}")

    def __str__(self) -> str:
        end = "?" if self.return_at is None else f"{self.return_at:g}"
        return f"{self.process} [{self.call_at:g}, {end}] {self.request} -> {self.response}"


class Model(Protocol[_State, _Req_contra, _Res_contra]):
    """A sequential model. States are hashable values; `step` has no side effects."""

    def initial(self) -> _State:
        """The state before the first operation."""
        ...

    def step(self, state: _State, request: _Req_contra, response: _Res_contra | Unknown) -> list[_State]:
        """Return the states that can follow, or an empty list if `response` is impossible in `state`."""
        ...


@runtime_checkable
class GuidedModel(Protocol[_State, _Req, _Res]):
    """A model that speeds up the search. Its hints must hold for every order of the history."""

    def initial(self) -> _State: ...

    def step(self, state: _State, request: _Req, response: _Res | Unknown) -> list[_State]: ...

    def is_read(self, request: _Req, response: _Res | Unknown) -> bool:
        """Return True only if no state changes when this request gets this response."""
        ...

    def informed_by(self, history: Sequence[Operation[_Req, _Res]]) -> GuidedModel[_State, _Req, _Res]:
        """Return a model for this history. It may refuse steps that no accepted order contains."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict and its explanation: the order that was found, or where every order failed."""

    ok: bool
    explanation: str

    def __bool__(self) -> bool:
        return self.ok


class History(Generic[_Req, _Res]):
    """Records operations while they run. A counter gives every event its own instant."""

    def __init__(self) -> None:
        self._ticks = 0
        self._open: dict[int, tuple[str, int, _Req]] = {}
        self._closed: list[Operation[_Req, _Res]] = []

    def call(self, process: str, request: _Req) -> int:
        """Record the start of an operation, and return its id for later calls."""
        self._ticks += 1
        self._open[self._ticks] = (process, self._ticks, request)
        return self._ticks

    def returned(self, call: int, response: _Res) -> None:
        """Record that the operation took effect and returned."""
        process, call_at, request = self._open.pop(call)
        self._ticks += 1
        self._closed.append(
            Operation(
                process=process, call_at=call_at, return_at=self._ticks, request=request, response=response
            )
        )

    def failed(self, call: int) -> None:
        """Record that the operation definitely had no effect."""
        del self._open[call]

    def operations(self) -> list[Operation[_Req, _Res]]:
        """Return the history so far. Operations that have not returned have an unknown outcome."""
        pending: list[Operation[_Req, _Res]] = [
            Operation(process=process, call_at=call_at, return_at=None, request=request, response=UNKNOWN)
            for process, call_at, request in self._open.values()
        ]
        return sorted([*self._closed, *pending], key=lambda operation: operation.call_at)


def check(history: Iterable[Operation[_Req, _Res]], model: Model[_State, _Req, _Res]) -> Verdict:
    """Search an order of `history` that `model` allows and that respects real time.

    The search is complete: `ok` is False only if there is no such order. In the worst case it is exponential
    in the number of overlapping operations. The prunings below make that rare.
    """
    operations = sorted(history, key=lambda operation: operation.call_at)
    if isinstance(model, GuidedModel):
        guide: GuidedModel[_State, _Req, _Res] = model.informed_by(operations)
        reads = [guide.is_read(operation.request, operation.response) for operation in operations]
        return _Search(operations, guide, reads).run()
    return _Search(operations, model, [False] * len(operations)).run()


@dataclass(slots=True)
class _Node(Generic[_State]):
    """A prefix of an order: its operations, its state, and the continuations still to try."""

    done: int
    used: int
    state: _State
    ways: Iterator[tuple[int, _State]] = field(default_factory=lambda: iter(()))
    entered_by: int = -1


class _Search(Generic[_State, _Req, _Res]):
    """A depth-first search over prefixes. Sets of operations are bit masks over the two lists below.

    Each pruning keeps at least one accepted order if there is one:
    1. A read that can come next comes next, without branching. This applies only to an operation that is a
       read in every state: a dequeue that removes nothing now might have to remove something later.
    2. An unknown operation that does not change the state is treated as if it never happened.
    3. A prefix is dropped if an earlier one had the same known operations and the same state, and had used
       no unknown operation that this one has not used.
    """

    def __init__(
        self,
        history: Sequence[Operation[_Req, _Res]],
        model: Model[_State, _Req, _Res],
        reads: Sequence[bool],
    ) -> None:
        pairs = zip(history, reads, strict=True)
        self._reads = [is_read for operation, is_read in pairs if operation.return_at is not None]
        self._known = [operation for operation in history if operation.return_at is not None]
        self._unknown = [operation for operation in history if operation.return_at is None]
        self._returns = [float(operation.return_at or 0.0) for operation in self._known]
        self._model = model
        self._all = (1 << len(self._known)) - 1
        self._seen: dict[tuple[int, _State], list[int]] = {}
        self._best: _Node[_State] | None = None

    def run(self) -> Verdict:
        root = _Node(0, 0, self._model.initial())
        stack = [root]
        root.ways = self._ways(root)
        while stack:
            node = stack[-1]
            self._remember_best(node)
            if node.done == self._all:
                return Verdict(ok=True, explanation=self._order_text(stack))
            for entered_by, state in node.ways:
                child = self._child(node, entered_by, state)
                if self._is_new(child):
                    child.ways = self._ways(child)
                    stack.append(child)
                    break
            else:
                stack.pop()
        return Verdict(ok=False, explanation=self._stuck_text())

    def _child(self, node: _Node[_State], entered_by: int, state: _State) -> _Node[_State]:
        """Return the prefix after one more operation. Known ones are numbered from 0, unknown ones after."""
        unknown = entered_by - len(self._known)
        if unknown >= 0:
            return _Node(node.done, node.used | 1 << unknown, state, entered_by=entered_by)
        return _Node(node.done | 1 << entered_by, node.used, state, entered_by=entered_by)

    def _is_new(self, node: _Node[_State]) -> bool:
        masks = self._seen.setdefault((node.done, node.state), [])
        if any(mask & node.used == mask for mask in masks):
            return False
        masks[:] = [mask for mask in masks if mask & node.used != node.used]
        masks.append(node.used)
        return True

    def _frontier(self, done: int) -> tuple[list[int], float]:
        """Return the known operations that may come next, and the latest start of the next operation."""
        index = (~done & (done + 1)).bit_length() - 1
        candidates: list[int] = []
        deadline = float("inf")
        while index < len(self._known):
            if not done >> index & 1:
                if self._known[index].call_at > deadline:
                    break
                candidates.append(index)
                deadline = min(deadline, self._returns[index])
            index += 1
        return [index for index in candidates if self._known[index].call_at <= deadline], deadline

    def _ways(self, node: _Node[_State]) -> Iterator[tuple[int, _State]]:
        candidates, deadline = self._frontier(node.done)
        ways: list[tuple[int, _State]] = []
        for index in candidates:
            operation = self._known[index]
            states = self._model.step(node.state, operation.request, operation.response)
            if self._reads[index] and states:
                return iter(((index, node.state),))
            ways += [(index, state) for state in states]
        # Try the earliest return first: it is the most likely next one, and a wrong guess fails early.
        ways.sort(key=lambda way: self._returns[way[0]])
        return self._with_unknown(node, ways, deadline)

    def _with_unknown(
        self, node: _Node[_State], ways: list[tuple[int, _State]], deadline: float
    ) -> Iterator[tuple[int, _State]]:
        yield from ways
        for index, operation in enumerate(self._unknown):
            if operation.call_at > deadline:
                return
            if node.used >> index & 1:
                continue
            for state in self._model.step(node.state, operation.request, UNKNOWN):
                if state != node.state:
                    yield len(self._known) + index, state

    def _remember_best(self, node: _Node[_State]) -> None:
        if self._best is None or node.done.bit_count() > self._best.done.bit_count():
            self._best = node

    def _order_text(self, stack: Sequence[_Node[_State]]) -> str:
        both = [*self._known, *self._unknown]
        return "\n".join(["accepted order:", *(f"  {both[node.entered_by]}" for node in stack[1:])])

    def _stuck_text(self) -> str:
        assert self._best is not None
        candidates, _ = self._frontier(self._best.done)
        fitting = f"{self._best.done.bit_count()} of {len(self._known)} known operations"
        lines = [
            f"no order is possible; at best {fitting} fit, in state {self._best.state}; these cannot follow:",
            *(f"  {self._known[index]}" for index in candidates),
        ]
        return "\n".join(lines)
