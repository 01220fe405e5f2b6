"""Routers that could not go on: each rests, longer every time, or until its destination changes."""

from __future__ import annotations

from itertools import islice
from typing import Final, TypeAlias

from penstock.topics.config import TopicConfig
from penstock.topics.router_table import Router

__all__ = ["REST_MAX_S", "REST_MIN_S", "Resting"]

REST_MIN_S: Final = 0.05
REST_MAX_S: Final = 2.0
_RISEN_MAX: Final = 256
"""So many try again at once; the others have their turn soon after."""

_Look: TypeAlias = tuple[int, int, TopicConfig]


class Resting:
    """Time is passed in, in seconds."""

    def __init__(self) -> None:
        self._resting: dict[Router, tuple[float, _Look]] = {}
        """Until when, and how the destination looked when it did not go on."""
        self._pauses: dict[Router, float] = {}

    def __len__(self) -> int:
        return len(self._resting)

    def __contains__(self, router: Router) -> bool:
        return router in self._resting

    def rest(self, router: Router, now_s: float) -> None:
        """It tried, and could not go on. Whoever made it try out of turn does not make it rest longer."""
        if router in self._resting:
            until_s = self._resting[router][0]
        else:
            pause_s = min(2 * self._pauses.get(router, REST_MIN_S / 2), REST_MAX_S)
            self._pauses[router] = pause_s
            until_s = now_s + pause_s
        self._resting[router] = until_s, _look(router)

    def forget(self, router: Router) -> None:
        """It got on, or has nothing to do any more."""
        self._resting.pop(router, None)
        self._pauses.pop(router, None)

    def rise(self, now_s: float) -> list[Router]:
        """Those that may try again: their time is over, or their destination may have room now."""
        ready = (
            router
            for router, (until_s, look) in self._resting.items()
            if until_s <= now_s or look != _look(router)
        )
        risen = list(islice(ready, _RISEN_MAX))
        for router in risen:
            del self._resting[router]
        return risen


def _look(router: Router) -> _Look:
    dest = router.dest
    return dest.index.live, dest.index.live_bytes, dest.config
