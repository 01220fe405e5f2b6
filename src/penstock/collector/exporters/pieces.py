"""A bundle that is too large for one request, sent in several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.collector.outcome import Outcome, Verdict, delivered, refused
from penstock.collector.payload import Payload
from penstock.errors import PenstockError

__all__ = ["send_in_pieces"]

_INLINE_BYTES: Final = 64 * 1024


async def send_in_pieces(
    payload: Payload, limit_bytes: int, send: Callable[[bytes], Awaitable[Outcome]]
) -> Outcome:
    """Send all pieces, one after the other; the first that is not taken ends it.

    A retry sends every piece again, those that arrived included: at least once, as for whole bundles. A piece
    that is refused for good ends the bundle as refused only after the others had their turn.
    """
    try:
        pieces = await _pieces(payload, limit_bytes)
    except PenstockError as error:
        return refused(f"the bundle cannot be sent: {error}")
    if len(pieces) == 1:
        return await send(pieces[0])
    rejected, message, refusal = 0, "", None
    for piece in pieces:
        outcome = await send(piece)
        if outcome.verdict is Verdict.RETRY:
            return outcome
        if outcome.verdict is Verdict.REJECT:
            refusal = outcome
        rejected += outcome.rejected_items
        message = message or outcome.reason
    return refusal or delivered(rejected_items=rejected, message=message)


async def _pieces(payload: Payload, limit_bytes: int) -> list[bytes]:
    """Bytes are there already; columns have to be turned into them, which may take a while."""
    if payload.work_bytes > _INLINE_BYTES:
        return await asyncio.to_thread(payload.pieces, limit_bytes)
    return payload.pieces(limit_bytes)
