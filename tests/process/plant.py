"""A directory store, a database and the processes that work on them: started, killed and checked."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import penstock
from penstock.buffer import manifest
from penstock.buffer.batch import decode_batch
from penstock.errors import NotFound
from penstock.objects import LocalStore

__all__ = ["Plant", "pause"]

HERE = Path(__file__).parent
SOURCES = [str(Path(penstock.__file__).parent.parent), str(HERE.parent.parent)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
PATIENCE_S = 60.0


@dataclass
class Plant:
    """Everything lives below `root`. Leaving the context kills what still runs."""

    root: Path
    running: dict[subprocess.Popen[bytes], Path] = field(default_factory=dict)
    producers: int = 0
    launched: int = 0

    @property
    def store(self) -> str:
        return f"file://{self.root}/store"

    @property
    def database(self) -> Path:
        return self.root / "events.db"

    def __enter__(self) -> Plant:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in list(self.running):
            self.kill(process)

    def start_producer(self) -> subprocess.Popen[bytes]:
        """A producer whose ids no other one uses, with a journal of its own."""
        self.producers += 1
        name = f"p{self.producers}"
        journal = self.root / f"{name}.journal"
        return self._start("kill_producer.py", self.store, str(journal), name)

    def start_consumer(self, *options: str) -> subprocess.Popen[bytes]:
        return self._start("kill_consumer.py", self.store, str(self.database), *options)

    def _start(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / script), *arguments]
        # Files, not pipes: nobody reads along, and a full pipe would stop the writer.
        self.launched += 1
        name = self.root / f"{self.launched}.{script}"
        with open(f"{name}.out", "wb") as out, open(f"{name}.err", "wb") as err:
            process = subprocess.Popen(
                command, env=ENVIRONMENT, stdout=out, stderr=err, stdin=subprocess.DEVNULL
            )
        self.running[process] = name
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        del self.running[process]

    def expect_alive(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            raise AssertionError(f"a process ended with {process.returncode}: {self._said(process, 'err')}")

    def wait(self, process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
        """Its exit code and what it wrote, once it ended by itself."""
        process.wait(PATIENCE_S)
        said = self._said(process, "out"), self._said(process, "err")
        del self.running[process]
        return process.returncode, *said

    def _said(self, process: subprocess.Popen[bytes], where: str) -> str:
        return Path(f"{self.running[process]}.{where}").read_text()

    def drain(self) -> None:
        """Consume until the queue is empty, with nobody killing anybody."""
        code, _, err = self.wait(self.start_consumer("--once"))
        assert code == 0, err

    def wait_for_acks(self, count: int) -> None:
        """Until the producers learned `count` times that their records are durable."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.journaled("acked")) < count:
            assert time.monotonic() < deadline, "the producers make no progress"
            time.sleep(0.02)

    def wait_for_rows(self, count: int) -> None:
        """Until the database holds `count` rows."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.rows()) < count:
            assert time.monotonic() < deadline, "the consumer makes no progress"
            time.sleep(0.02)

    def journaled(self, word: str) -> dict[str, int]:
        """Calls and their record counts, by the journals. A line that a kill cut short does not count."""
        found: dict[str, int] = {}
        for journal in self.root.glob("*.journal"):
            for line in journal.read_text().splitlines(keepends=True):
                kind, call, count = (line.split() + ["", "", ""])[:3]
                if kind == word and line.endswith("\n"):
                    found[call] = int(count) if count.isdigit() else 0
        return found

    def rows(self) -> list[tuple[int, str]]:
        if not self.database.exists():
            return []
        database = sqlite3.connect(self.database, timeout=PATIENCE_S)
        try:
            found = database.execute("SELECT sequence, body FROM events ORDER BY rowid").fetchall()
        except sqlite3.OperationalError:
            return []  # the table is not made yet
        finally:
            database.close()
        return [(sequence, body.decode()) for sequence, body in found]

    def check_queue(self) -> manifest.Manifest:
        """I3 and I6: the manifest is well numbered, and everything that it names is there and decodes."""
        return asyncio.run(self._check_queue())

    async def _check_queue(self) -> manifest.Manifest:
        store = LocalStore(self.root / "store")
        try:
            decoded = manifest.decode_manifest(bytes((await store.get("ingest/manifest")).data))
            for entry in decoded.entries:
                decode_batch((await store.get(entry.location)).data)
        except NotFound as error:
            raise AssertionError(f"I6: {error}") from error
        finally:
            await store.close()
        return decoded

    def check_drained(self) -> None:
        """After the last drain: every acknowledged record is in the table once, and no other was invented."""
        queue = self.check_queue()
        rows = self.rows()
        seen = Counter(body for _, body in rows)
        acked = _records(self.journaled("acked"))
        doubled = [body for body, times in seen.items() if times > 1]
        assert not doubled, f"I4: {len(doubled)} records twice, for example {doubled[:5]}"
        lost = sorted(acked - set(seen))
        assert not lost, f"I1: {len(lost)} acknowledged records are lost, for example {lost[:5]}"
        phantoms = set(seen) - _records(self.journaled("started"))
        assert not phantoms, (
            f"I2: {len(phantoms)} records that nobody produced, for example {[*phantoms][:5]}"
        )
        refused = set(self.journaled("failed"))
        assert not refused, f"a directory store gives no reason to fail: {refused}"
        sequences = [sequence for sequence, _ in rows]
        assert sequences == sorted(sequences), "I3: batches were stored out of order"
        assert sorted(set(sequences)) == list(range(queue.footer.next_sequence)), "I3: a sequence is missing"
        assert queue.entries == (), "the queue is not empty"


def _records(calls: dict[str, int]) -> set[str]:
    return {f"{call}.{place}" for call, count in calls.items() for place in range(count)}


def pause(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Stop a process for a while, as a long garbage collection or a frozen machine would."""
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGCONT)
