"""How urgent a topic is: what its owner says, who reads it, and how long it has waited."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["effective_priority"]

_LIMIT: Final = 1000
_READ_BONUS: Final = 500
_HALF_LIFE_MS: Final = 30_000
_IDLE_MS_MAX: Final = 300_000
"""From here on a topic counts as unread."""
_AGEING_PER_MS: Final = 0.1
_AGEING_MS_MAX: Final = 10_000


def effective_priority(
    priority: int | None,
    *,
    auto_priority: bool,
    now_ms: int,
    last_consumed_ms: int | None,
    enqueued_ms: int | None = None,
) -> int:
    """The priority right now.

    Without one of its own a topic that is read gets up to 500, halved with every 30 s without a reader. What
    waits since `enqueued_ms` rises by 100 per second, up to 1000; None leaves that out.
    """
    total = float(max(-_LIMIT, min(_LIMIT, priority or 0)))
    if priority is None and auto_priority and last_consumed_ms is not None:
        idle_ms = max(0, now_ms - last_consumed_ms)
        if idle_ms < _IDLE_MS_MAX:
            total += _READ_BONUS * 2.0 ** (-idle_ms / _HALF_LIFE_MS)
    if enqueued_ms is not None:
        total += _AGEING_PER_MS * min(max(now_ms - enqueued_ms, 0), _AGEING_MS_MAX)
    return int(math.copysign(math.floor(abs(total) + 0.5), total))
