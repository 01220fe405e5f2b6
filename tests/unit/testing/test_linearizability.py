from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.testing import UNKNOWN, History, QueueModel, check
from penstock.testing.linearizability import Operation
from penstock.testing.queue_model import (
    Append,
    Bump,
    Dequeue,
    Done,
    Peek,
    QueueOperation,
    QueueRequest,
    QueueResponse,
)


def op(
    call_at: float, return_at: float | None, request: QueueRequest, response: QueueResponse | None = None
) -> QueueOperation:
    return Operation(
        process="p",
        call_at=call_at,
        return_at=return_at,
        request=request,
        response=UNKNOWN if response is None else response,
    )


def accepted(*history: QueueOperation) -> bool:
    return check(history, QueueModel()).ok


def recorded_run(
    rng: random.Random, length: int, *, concurrency: float = 10.0, unknown: float = 0.06
) -> list[QueueOperation]:
    """Return a real sequential run, with operations stretched so that they overlap."""
    epoch, first, entries = 0, 0, list[str]()
    history: list[QueueOperation] = []
    for at in range(length):
        request: QueueRequest
        response: QueueResponse
        lost = rng.random() < unknown
        applied = not lost or rng.random() < 0.6
        draw = rng.random()
        if draw < 0.5:
            request, response = Append(f"batch-{at}"), first + len(entries)
            if applied:
                entries.append(request.location)
        elif draw < 0.75:
            mine = max(0, epoch - (rng.random() < 0.2))
            request = Peek(mine)
            response = tuple(enumerate(entries, first)) if mine == epoch else Done.FENCED
        elif draw < 0.93:
            mine = max(0, epoch - (rng.random() < 0.2))
            request = Dequeue(mine, first + rng.randrange(-1, 4))
            response = Done.OK if mine == epoch else Done.FENCED
            if applied and mine == epoch:
                dropped = min(len(entries), max(0, request.through + 1 - first))
                first, entries = first + dropped, entries[dropped:]
        else:
            request, response = Bump(), epoch + 1
            epoch += applied
        before, after = rng.uniform(0, concurrency / 2), rng.uniform(0, concurrency / 2)
        history.append(
            op(at - before, None, request) if lost else op(at - before, at + after, request, response)
        )
    return history


def test_an_empty_history_is_accepted() -> None:
    assert accepted()


def test_a_sequential_run_is_accepted_and_explained_by_its_order() -> None:
    verdict = check(
        [
            op(0, 1, Bump(), 1),
            op(2, 3, Append("a"), 0),
            op(4, 5, Append("b"), 1),
            op(6, 7, Peek(1), ((0, "a"), (1, "b"))),
            op(8, 9, Dequeue(1, 0), Done.OK),
            op(10, 11, Peek(1), ((1, "b"),)),
            op(12, 13, Bump(), 2),
            op(14, 15, Dequeue(1, 1), Done.FENCED),
            op(16, 17, Peek(1), Done.FENCED),
            op(18, 19, Peek(2), ((1, "b"),)),
        ],
        QueueModel(),
    )
    assert verdict
    assert verdict.explanation.count("->") == 10


def test_concurrent_appends_may_land_in_either_order() -> None:
    assert accepted(op(0, 10, Append("a"), 1), op(0, 10, Append("b"), 0))


def test_operations_that_do_not_overlap_keep_their_order() -> None:
    assert not accepted(op(0, 1, Append("a"), 1), op(2, 3, Append("b"), 0))


def test_operations_that_touch_at_one_instant_may_go_either_way() -> None:
    assert accepted(op(0, 1, Append("a"), 1), op(1, 2, Append("b"), 0))


@pytest.mark.parametrize("seen", [(), ((0, "a"),)])
def test_an_unknown_append_may_have_happened_or_not(seen: QueueResponse) -> None:
    assert accepted(op(0, None, Append("a")), op(5, 6, Peek(0), seen))


def test_an_unknown_append_may_happen_long_after_its_call() -> None:
    assert accepted(
        op(0, None, Append("a")),
        op(5, 6, Peek(0), ()),
        op(7, 8, Append("b"), 0),
        op(9, 10, Peek(0), ((0, "b"), (1, "a"))),
    )


def test_an_unknown_append_happens_at_most_once() -> None:
    assert not accepted(op(0, None, Append("a")), op(5, 6, Peek(0), ((0, "a"), (1, "a"))))


def test_an_unknown_append_does_not_happen_before_its_call() -> None:
    assert not accepted(op(1, 2, Peek(0), ((0, "a"),)), op(3, None, Append("a")))


def test_an_unknown_append_once_seen_cannot_vanish() -> None:
    assert not accepted(op(0, None, Append("a")), op(1, 2, Peek(0), ((0, "a"),)), op(3, 4, Peek(0), ()))


def test_an_unobserved_unknown_append_may_explain_a_missing_sequence() -> None:
    unseen = [op(0, None, Append("a")), op(2, 3, Append("b"), 1)]
    assert accepted(*unseen)
    assert not accepted(unseen[1])


def test_an_unknown_dequeue_may_explain_missing_entries() -> None:
    history = [op(0, 1, Append("a"), 0), op(2, None, Dequeue(0, 0)), op(3, 4, Peek(0), ())]
    assert accepted(*history)
    assert not accepted(history[0], history[2])


def test_an_unknown_bump_may_explain_a_fence() -> None:
    history = [op(0, None, Bump()), op(1, 2, Dequeue(0, 5), Done.FENCED)]
    assert accepted(*history)
    assert not accepted(history[1])


def test_a_dequeue_that_would_remove_nothing_yet_may_take_effect_later() -> None:
    assert accepted(
        op(0, 10, Dequeue(0, 0), Done.OK),
        op(1, 2, Append("a"), 0),
        op(3, 4, Peek(0), ((0, "a"),)),
        op(11, 12, Peek(0), ()),
    )


def test_a_limited_peek_shows_the_entries_after_a_sequence() -> None:
    appends = [op(at, at + 0.5, Append(name), at) for at, name in enumerate("abcd")]
    assert accepted(*appends, op(9, 10, Peek(0, after=0, limit=2), ((1, "b"), (2, "c"))))
    assert not accepted(*appends, op(9, 10, Peek(0, after=0, limit=2), ((2, "c"), (3, "d"))))


def test_a_queue_may_begin_with_other_numbers() -> None:
    history = [op(0, 1, Append("a"), 41), op(2, 3, Bump(), 8)]
    assert check(history, QueueModel(epoch=7, next_sequence=41))


SOUND = [
    op(0, 1, Bump(), 1),
    op(2, 4, Append("a"), 0),
    op(5, 7, Append("b"), 1),
    op(6, None, Append("lost")),
    op(8, 9, Peek(1), ((0, "a"), (1, "b"))),
    op(10, 11, Append("c"), 2),
    op(12, 13, Dequeue(1, 0), Done.OK),
    op(14, 15, Peek(1), ((1, "b"), (2, "c"))),
    op(16, 17, Bump(), 2),
    op(18, 19, Dequeue(1, 2), Done.FENCED),
    op(20, 21, Peek(2), ((1, "b"), (2, "c"))),
]


def test_the_history_that_the_mutants_come_from_is_accepted() -> None:
    assert accepted(*SOUND)


@pytest.mark.parametrize(
    ("at", "mutant"),
    [
        pytest.param(1, op(2, 4, Append("a"), 1), id="one sequence given twice"),
        pytest.param(4, op(8, 9, Peek(1), ((0, "b"), (1, "a"))), id="entries swapped"),
        pytest.param(4, op(8, 9, Peek(1), ((0, "a"),)), id="stale peek"),
        pytest.param(7, op(14, 15, Peek(1), ((2, "c"),)), id="acknowledged append lost"),
        pytest.param(7, op(14, 15, Peek(1), ((1, "b"), (2, "c"), (3, "b"))), id="append doubled"),
        pytest.param(7, op(14, 15, Peek(1), ((1, "b"), (3, "c"))), id="hole in the sequences"),
        pytest.param(7, op(14, 15, Peek(1), ((0, "a"), (1, "b"), (2, "c"))), id="dequeued entry back"),
        pytest.param(7, op(14, 15, Peek(1), ((1, "b"), (2, "x"))), id="entry nobody appended"),
        pytest.param(8, op(16, 17, Bump(), 1), id="epoch given twice"),
        pytest.param(8, op(16, 17, Bump(), 3), id="epoch skipped"),
        pytest.param(9, op(18, 19, Dequeue(1, 2), Done.OK), id="fenced dequeue accepted"),
        pytest.param(10, op(20, 21, Peek(1), ((1, "b"), (2, "c"))), id="fenced peek answered"),
        pytest.param(10, op(20, 21, Peek(2), Done.FENCED), id="owner fenced for nothing"),
    ],
)
def test_a_broken_history_is_rejected_with_the_operations_that_do_not_fit(
    at: int, mutant: QueueOperation
) -> None:
    verdict = check([*SOUND[:at], mutant, *SOUND[at + 1 :]], QueueModel())
    assert not verdict
    assert "no order is possible" in verdict.explanation


def test_swapped_sequences_of_appends_in_a_row_are_rejected() -> None:
    assert not accepted(*SOUND[:1], op(2, 4, Append("a"), 1), op(5, 7, Append("b"), 0))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(0, 60),
    concurrency=st.sampled_from([0.0, 2.0, 6.0, 12.0]),
    unknown=st.sampled_from([0.0, 0.06, 0.2]),
)
def test_a_history_of_a_real_run_is_always_accepted(
    seed: int, length: int, concurrency: float, unknown: float
) -> None:
    history = recorded_run(random.Random(seed), length, concurrency=concurrency, unknown=unknown)
    assert check(history, QueueModel())


class PlainQueueModel:
    """The same model without knowledge of the whole history."""

    def __init__(self) -> None:
        self._model = QueueModel()

    def initial(self) -> tuple[int, int, tuple[str, ...]]:
        return self._model.initial()

    def step(
        self, state: tuple[int, int, tuple[str, ...]], request: QueueRequest, response: object
    ) -> list[tuple[int, int, tuple[str, ...]]]:
        return self._model.step(state, request, response)  # type: ignore[arg-type]


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_looking_ahead_in_the_history_never_changes_the_verdict(seed: int) -> None:
    rng = random.Random(seed)
    history = _mutated(rng, recorded_run(rng, 12, concurrency=4.0, unknown=0.25))
    assert check(history, QueueModel()).ok == check(history, PlainQueueModel()).ok


def _any_order_works(history: list[QueueOperation]) -> bool:
    """Try every order of every choice of unknown operations: the definition of linearizability."""
    known = [item for item in history if item.return_at is not None]
    unknown = [item for item in history if item.return_at is None]
    return any(
        _order_works(order)
        for count in range(len(unknown) + 1)
        for chosen in itertools.combinations(unknown, count)
        for order in itertools.permutations([*known, *chosen])
    )


def _order_works(order: tuple[QueueOperation, ...]) -> bool:
    model = QueueModel()
    states = [model.initial()]
    called = float("-inf")
    for item in order:
        called = max(called, item.call_at)
        if item.return_at is not None and item.return_at < called:
            return False
        states = [after for state in states for after in model.step(state, item.request, item.response)]
    return bool(states)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), mutate=st.booleans())
def test_the_search_agrees_with_trying_every_order(seed: int, mutate: bool) -> None:
    rng = random.Random(seed)
    history = recorded_run(rng, 6, concurrency=4.0, unknown=0.3)
    if mutate:
        history = _mutated(rng, history)
    assert check(history, QueueModel()).ok == _any_order_works(history)


def _mutated(rng: random.Random, history: list[QueueOperation]) -> list[QueueOperation]:
    """Change one known number or one peek, or nothing if there is none."""
    known = [at for at, operation in enumerate(history) if operation.return_at is not None]
    if not known:
        return history
    at = rng.choice(known)
    response = history[at].response
    changed: QueueResponse
    if isinstance(response, int):
        changed = max(0, response + rng.choice([-1, 1]))
    elif isinstance(response, tuple):
        changed = response[:-1] if response else ((0, "batch-0"),)
    else:
        changed = Done.OK if response is Done.FENCED else Done.FENCED
    return [*history[:at], replace(history[at], response=changed), *history[at + 1 :]]


@pytest.mark.parametrize("seed", range(20))
def test_a_hundred_and_fifty_overlapping_operations_are_checked_quickly(seed: int) -> None:
    history = recorded_run(random.Random(seed), 150)
    started = time.process_time()
    assert check(history, QueueModel())
    assert time.process_time() - started < 1


@pytest.mark.parametrize("seed", range(20))
def test_a_lost_append_among_a_hundred_and_fifty_operations_is_rejected_quickly(seed: int) -> None:
    history = recorded_run(random.Random(seed), 150)
    end = max(operation.return_at or 0 for operation in history)
    appends = [item for item in history if isinstance(item.request, Append) and item.return_at is not None]
    late = len(appends) * 2 // 3
    doubled = replace(appends[late], call_at=end + 1, return_at=end + 2)
    started = time.process_time()
    assert not check([*history, doubled], QueueModel())
    without = [item for item in history if item is not appends[late]]
    assert not check(without, QueueModel())
    assert time.process_time() - started < 2


def test_a_recorder_orders_events_and_leaves_what_did_not_return_open() -> None:
    history = History[QueueRequest, QueueResponse]()
    first = history.call("p1", Append("a"))
    history.call("p2", Append("b"))
    third = history.call("p3", Append("c"))
    history.returned(first, 0)
    history.failed(third)
    operations = history.operations()
    assert [(item.process, item.call_at, item.return_at) for item in operations] == [
        ("p1", 1, 4),
        ("p2", 2, None),
    ]
    assert check(operations, QueueModel())


def test_an_operation_has_a_return_exactly_when_its_response_is_known() -> None:
    with pytest.raises(ValueError, match="exactly when"):
        op(0, None, Append("a"), 0)
    with pytest.raises(ValueError, match="exactly when"):
        op(0, 1, Append("a"))
    with pytest.raises(ValueError, match="before its call"):
        op(2, 1, Append("a"), 0)
