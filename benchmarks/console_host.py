"""A console in its own process, over one topics server, that runs until its standard input ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

from penstock.console import Console, ConsoleSettings
from penstock.http.auth import Keyring
from penstock.up import FleetEvent, FleetMap, LogLine, PartKind, PartState, PartStatus, TopicsPlace


class OneServer:
    """A fleet with only a topics server. See `FleetView`."""

    def __init__(self, url: str) -> None:
        self.map = FleetMap(data_dir="", topics=TopicsPlace(part="topics", data_dir=""))
        self._topics = PartStatus(
            name="topics",
            kind=PartKind.TOPICS,
            state=PartState.READY,
            since_ms=time.time_ns() // 1_000_000,
            address=url.removeprefix("http://").rstrip("/"),
        )

    def parts(self) -> Sequence[PartStatus]:
        return [self._topics]

    def log(self, after: int = 0, limit: int = 200) -> Sequence[LogLine]:
        return []

    def subscribe(self, listener: Callable[[FleetEvent], None]) -> Callable[[], None]:
        return lambda: None


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
