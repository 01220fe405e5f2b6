"""A console in a process of its own, and somebody who watches it when told to (`watch`, `rest`)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence

import httpx

from penstock.server.auth import Keyring
from penstock.server.console import Console, ConsoleSettings
from penstock.server.console.seam import (
    Change,
    CommandOutcome,
    LogLine,
    Part,
    PartState,
    Plan,
    TopicsPlace,
)

_HEADERS = {"Authorization": "Bearer bench"}


class OneServer:
    """A host with a topics server and nothing else."""

    def __init__(self, url: str) -> None:
        self._plan = Plan(topics=TopicsPlace(part="topics", url=url))
        self._since_ms = time.time_ns() // 1_000_000

    def parts(self) -> Sequence[Part]:
        return [Part(name="topics", kind="topics", state=PartState.READY, since_ms=self._since_ms)]

    def plan(self) -> Plan:
        return self._plan

    def log(self) -> Sequence[LogLine]:
        return []

    def subscribe(self, tell: Callable[[Change], None]) -> Callable[[], None]:
        return lambda: None

    async def run(self, arguments: Sequence[str], tell: Callable[[str], None]) -> CommandOutcome:
        raise NotImplementedError("nothing is redriven here")


async def _watch(url: str) -> None:
    """What an open page does: the live stream, and the list of topics every two seconds."""
    async with httpx.AsyncClient(base_url=f"{url}/api/", headers=_HEADERS, timeout=60) as client:

        async def follow() -> None:
            async with client.stream("GET", "live") as answer:
                async for _ in answer.aiter_bytes():
                    pass

        following = asyncio.create_task(follow())
        try:
            while True:
                (await client.get("topics", params={"limit": "100"})).raise_for_status()
                await asyncio.sleep(2)
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following


async def _main(url: str) -> None:
    console = Console(OneServer(url), ConsoleSettings(port=0, keys=Keyring.parse("bench")))
    await console.start()
    print("ready", flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    watching: asyncio.Task[None] | None = None
    while order := (await reader.readline()).strip():
        if order == b"watch" and watching is None:
            watching = asyncio.create_task(_watch(console.url))
        elif order == b"rest" and watching is not None:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            watching = None
        print("done", flush=True)
    await console.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
