"""Dead letters: bundles that a destination rejected, stored as requests that can be sent again.

    <path>/<exporter>/<place>-<signal>.pb      the OTLP request: the body of a POST to /v1/<signal>
    <path>/<exporter>/<place>-<signal>.json    the reason, the time, and the size and checksum of the request

A bundle is rejected only after both files are durable. `replay` sends dead letters again and removes each one
that is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import xxhash

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.collector.outcome import Outcome, Verdict, refused
from penstock.collector.payload import Exporter, Payload, RawPayload
from penstock.errors import NotFound, PenstockError, PermissionDenied
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.otlp import Signal
from penstock.storage import FileSystem, OsFileSystem, write_durably


def make_durably(fs: FileSystem, path: str) -> None:
    """Durably create a directory and its parents.

    Existing directories are synced too, because an earlier call may have failed before their names were
    durable. Raise errors of the disk.
    """
    fs.make_dirs(path)
    above = os.path.dirname(path)
    while above != path:
        # A directory that we may not open was not created by us.
        with contextlib.suppress(PermissionDenied):
            fs.sync_dir(above)
        path, above = above, os.path.dirname(above)


_STAGING: Final = ".staging"
_REASON_MAX: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One refused bundle."""

    exporter: str
    signal: str
    reason: str
    attempts: int
    at_ms: int
    path: str
    """The path of the stored request."""
    size: int
    damage: str = ""
    """The damage of the stored request, or an empty string. A damaged request is not sent."""


class DeadLetters:
    """A directory of refused bundles. Its methods block, so do not call them on the event loop."""

    def __init__(self, path: str, *, fs: FileSystem | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path = os.path.abspath(path)
        self._fs = fs or OsFileSystem()
        self._clock = clock
        self._ready: set[str] = set()

    @property
    def path(self) -> str:
        return self._path

    def keep(self, exporter: str, payload: Payload, reason: str, attempts: int) -> DeadLetter:
        """Make a bundle and the reason durable. Raise errors of the disk; then the bundle must not be
        rejected.
        """
        staging = os.path.join(self._path, _STAGING)
        directory = os.path.join(self._path, exporter)
        for path in (staging, directory):
            if path not in self._ready:
                make_durably(self._fs, path)
                self._ready.add(path)
        name = payload.place or mint_ulid(self._clock.now_ms(), SYSTEM_RNG)
        stem = os.path.join(directory, f"{name}-{payload.signal.value}")
        data = payload.otlp()
        letter = DeadLetter(
            exporter=exporter,
            signal=payload.signal.value,
            reason=reason[:_REASON_MAX],
            attempts=attempts,
            at_ms=self._clock.now_ms(),
            path=f"{stem}.pb",
            size=len(data),
        )
        note = {key: value for key, value in asdict(letter).items() if key not in ("path", "damage")}
        note["xxh3"] = xxhash.xxh3_64_hexdigest(data)
        try:
            write_durably(self._fs, f"{stem}.pb", [data], staging=staging)
            write_durably(self._fs, f"{stem}.json", [json.dumps(note).encode()], staging=staging)
        except NotFound:
            self._ready.clear()  # the directories were removed; the next attempt creates them again
            raise
        return letter

    def letters(self) -> Iterator[DeadLetter]:
        """Yield every dead letter with its damage, ordered by exporter and bundle."""
        sizes = {name: stat.size for name, stat in self._fs.list_files(self._path)}
        stems = {name.rpartition(".")[0] for name in sizes if name.endswith((".pb", ".json"))}
        for stem in sorted(stems):
            exporter, slash, _ = stem.partition("/")
            if slash and exporter != _STAGING:
                yield self._letter(exporter, os.path.join(self._path, f"{stem}.pb"), sizes.get(f"{stem}.pb"))

    def remove(self, letter: DeadLetter) -> None:
        """Remove a dead letter that was sent again. Raise errors of the disk."""
        # Remove the note first: a note alone would look like a lost request.
        for path in (f"{letter.path[:-3]}.json", letter.path):
            with contextlib.suppress(NotFound):
                self._fs.unlink(path)
        self._fs.sync_dir(os.path.dirname(letter.path))

    def request(self, letter: DeadLetter) -> bytes:
        """Read the OTLP request of a dead letter."""
        return self._fs.read(letter.path)

    def _letter(self, exporter: str, path: str, size: int | None) -> DeadLetter:
        note: dict[str, object] = {}
        try:
            content = json.loads(self._fs.read(f"{path[:-3]}.json"))
            note = content if isinstance(content, dict) else {}
        except (PenstockError, ValueError):
            pass
        signal = path[:-3].rpartition("-")[2]
        attempts, at_ms = note.get("attempts"), note.get("at_ms")
        return DeadLetter(
            exporter=exporter,
            signal=signal,
            reason=str(note.get("reason", "its note is missing or damaged")),
            attempts=attempts if isinstance(attempts, int) else 0,
            at_ms=at_ms if isinstance(at_ms, int) else 0,
            path=path,
            size=size or 0,
            damage=self._damage(path, size, note),
        )

    def _damage(self, path: str, size: int | None, note: dict[str, object]) -> str:
        """Return the damage of a request according to its note. Notes of old versions have no checksum."""
        if size is None:
            return "the request is missing"
        known = note.get("size", size)
        if size != known or size == 0:
            return f"the request has {size} bytes instead of {known}"
        try:
            checksum = xxhash.xxh3_64_hexdigest(self._fs.read(path))
        except PenstockError as error:
            return f"the request cannot be read: {error}"
        if note.get("xxh3", checksum) != checksum:
            return "the request is not the one that was refused: its checksum does not match"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of sending one dead letter again."""

    letter: DeadLetter
    outcome: Outcome

    @property
    def is_taken(self) -> bool:
        return self.outcome.verdict is Verdict.ACK


async def replay(letters: Iterable[DeadLetter], store: DeadLetters, exporter: Exporter) -> list[Replayed]:
    """Send each dead letter once, in order. Stop at the first for which the destination is unreachable.

    Letters that are not accepted stay. Damaged ones stay too and are not sent. After a crash between
    acceptance and removal, a letter is sent again.
    """
    done: list[Replayed] = []
    await exporter.start()
    try:
        for letter in letters:
            if letter.damage:
                done.append(Replayed(letter=letter, outcome=refused(letter.damage)))
                continue
            data = await asyncio.to_thread(store.request, letter)
            outcome = await exporter.send(RawPayload(data, Signal(letter.signal)))
            done.append(Replayed(letter=letter, outcome=outcome))
            if outcome.verdict is Verdict.ACK:
                await asyncio.to_thread(store.remove, letter)
            elif outcome.is_down:
                break
    finally:
        await exporter.close()
    return done
