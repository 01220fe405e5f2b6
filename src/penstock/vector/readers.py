"""Room for those who search: threads of their own, how many may be under way, and how long one may take."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final, ParamSpec, TypeVar

from penstock.errors import Unavailable
from penstock.objects.workers import Workers

__all__ = ["Readers"]

P = ParamSpec("P")
T = TypeVar("T")

_THREADS_MAX: Final = 4
"""More searches at once than cores only make each of them slower."""


class Readers:
    """Flushes have a thread of their own, so that no number of readers makes writers wait."""

    def __init__(self, *, searches_max: int, timeout_s: float) -> None:
        self._searches_max = searches_max
        self._timeout_s = timeout_s
        self._under_way = 0
        self._workers = Workers("vector-search", min(_THREADS_MAX, os.cpu_count() or 1))

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Be one of those under way. Raises `Unavailable` if there are as many as may be."""
        if self._under_way >= self._searches_max:
            raise Unavailable(f"{self._searches_max} searches are under way, which is the cap: come again")
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """A place, for no longer than a search may take. Raises `Unavailable` for either."""
        with self.place():
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    yield
            except TimeoutError:
                if not limit.expired():
                    raise
                raise Unavailable(
                    f"the search took longer than {self._timeout_s:g} s and was given up"
                ) from None

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do it on a thread. One that was given up before it began is never begun."""
        return await self._workers.run(call, *args, **kwargs)

    def close(self) -> None:
        self._workers.close()
