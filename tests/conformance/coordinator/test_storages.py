"""Every storage keeps the one contract that databases stand on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.coordinator.slate import SlateStorage, SlateStore
from penstock.coordinator.storage import Storage
from penstock.testing.memory_storage import MemoryDisk
from penstock.testing.storage_kit import STORAGE_CHECKS, StorageCheck, join_operands


class MemoryWorld:
    def __init__(self) -> None:
        self._disk = MemoryDisk(merge=join_operands)

    async def open(self) -> Storage:
        return self._disk.open()

    async def close(self) -> None:
        pass


class SlateWorld:
    def __init__(self, url: str, *, persist_at_once: bool = False) -> None:
        self._store = SlateStore(url)
        self._persist_at_once = persist_at_once
        self._opened: list[SlateStorage] = []

    async def open(self) -> Storage:
        settings = {"flush_interval": "10ms"}
        storage = await SlateStorage.open(
            self._store,
            "db",
            merge=join_operands,
            settings=settings,
            persist_at_once=self._persist_at_once,
        )
        self._opened.append(storage)
        return storage

    async def close(self) -> None:
        # A database that is left open has threads that call into Python, even while it exits.
        for storage in self._opened:
            await storage.close()


WORLDS: dict[str, Callable[[Path], MemoryWorld | SlateWorld]] = {
    "memory": lambda path: MemoryWorld(),
    "slate-memory": lambda path: SlateWorld("memory:///"),
    "slate-file": lambda path: SlateWorld(path.as_uri()),
    "slate-file-at-once": lambda path: SlateWorld(path.as_uri(), persist_at_once=True),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", STORAGE_CHECKS, ids=lambda check: check.__name__)
async def test_a_storage_keeps_the_contract(check: StorageCheck, world: str, tmp_path: Path) -> None:
    opened = WORLDS[world](tmp_path)
    await check(opened)
    await opened.close()
