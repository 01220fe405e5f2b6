"""Values of an async iterator for callers without an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar

from penstock.blocking import LoopThread

__all__ = ["pull"]

T = TypeVar("T")


def pull(loop: LoopThread, source: AsyncGenerator[T, None]) -> Iterator[T]:
    """Values of an async iterator, one at a time, each when it is asked for."""

    async def following() -> T | None:
        return await anext(source, None)

    async def closing() -> None:
        await source.aclose()

    try:
        while (value := loop.run(following())) is not None:
            yield value
    finally:
        loop.run(closing())
