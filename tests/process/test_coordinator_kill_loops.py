"""A database over SlateDB, killed over and over: what was durable is there, and each word once (I1, I11)."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.process.cli_runner import environment
from tests.unit.coordinator.doubles import COUNTER, words_in

from penstock.coordinator.slate import SlateStorage

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("kill_coordinator.py")
LIVES = 5


def noted(journal: Path, kind: str) -> list[str]:
    """The words with a line of this kind; a line that a kill cut short does not count."""
    lines = journal.read_text(encoding="utf-8").split("\n")[:-1] if journal.exists() else []
    return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ")]


def live(store: str, journal: Path, name: str, rng: random.Random) -> None:
    """Run the program until it has made some words durable, then kill it at any moment."""
    before = len(noted(journal, "durable"))
    paths = environment()
    paths["PYTHONPATH"] += f":{ROOT}"
    with subprocess.Popen([sys.executable, PROGRAM, store, journal, name], env=paths) as process:
        deadline = time.monotonic() + 60
        while len(noted(journal, "durable")) < before + 20:
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "nothing becomes durable"
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()


async def stored(store: str) -> tuple[list[str], int]:
    async with await SlateStorage.open(store, "words") as storage:
        return await words_in(storage), int(await storage.get(COUNTER) or 0)


@pytest.mark.timeout(240)
def test_words_that_were_durable_survive_every_kill(tmp_path: Path) -> None:
    journal, store = tmp_path / "journal", (tmp_path / "store").as_uri()
    (tmp_path / "store").mkdir()
    rng = random.Random(11)
    for number in range(LIVES):
        live(store, journal, f"life{number}", rng)
        words, counter = asyncio.run(stored(store))
        assert len(words) == len(set(words)) == counter
        assert set(noted(journal, "durable")) <= set(words), "a durable word is gone"
        assert set(words) <= set(noted(journal, "started")), "a word that nobody wrote"
