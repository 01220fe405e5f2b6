"""A console in a process of its own, over one topics server, until its standard input ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

from penstock.console import Console, ConsoleSettings
from penstock.console.seam import (
    Change,
    CommandOutcome,
    LogLine,
    Part,
    PartState,
    Plan,
    TopicsPlace,
)
from penstock.servers.auth import Keyring


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


async def _main(url: str, key: str) -> None:
    console = Console(OneServer(url), ConsoleSettings(port=0, keys=Keyring.parse(key)))
    _, port = await console.start()
    print(port, flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    await console.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2]))
