"""Claimers that come within a moment are served together, so that jobs are dealt fairly among them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.clock import Clock
from penstock.topics.claiming import Claimer, Desk
from penstock.topics.errors import ShuttingDown
from penstock.topics.jobs import ClaimResult

__all__ = ["dismiss", "gather_cohort"]


async def gather_cohort(
    desk: Desk,
    clock: Clock,
    window_s: float,
    serve: Callable[[Sequence[Claimer]], Awaitable[list[ClaimResult]]],
) -> None:
    """Wait for the end of the window, then serve everybody who came and is still there, and tell them.

    Those that come from then on open the next window.
    """
    await clock.sleep(window_s)
    came, desk.cohort = desk.cohort, []
    cohort = [claimer for claimer in came if not _outcome(claimer).done()]
    try:
        results = await serve(cohort) if cohort else []
    except asyncio.CancelledError:
        dismiss(cohort)
        raise
    except Exception as error:  # noqa: BLE001 - it is handed to the claimers
        _fail(cohort, error)
        return
    for claimer, result in zip(cohort, results, strict=True):
        if not _outcome(claimer).done():
            _outcome(claimer).set_result(result)


def dismiss(cohort: Sequence[Claimer]) -> None:
    """The engine is closing: nobody will be served."""
    _fail(cohort, ShuttingDown("the event log is closing; retry when it is back"))


def _outcome(claimer: Claimer) -> asyncio.Future[ClaimResult]:
    assert claimer.outcome is not None
    return claimer.outcome


def _fail(claimers: Sequence[Claimer], error: Exception) -> None:
    for claimer in claimers:
        if not _outcome(claimer).done():
            _outcome(claimer).set_exception(error)
