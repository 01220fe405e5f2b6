"""A fault at every file call while bundles become files and dead letters, and an identity is made."""

from __future__ import annotations

import random

import pytest

from penstock.collector.dead_letters import DeadLetters
from penstock.collector.exporters import FileExporter
from penstock.collector.payload import Place, RawPayload
from penstock.collector.pipeline import directory_identity
from penstock.errors import PenstockError
from penstock.otlp.schema import Signal
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

COUNT = 3
LETTERS, FILES, HOME = "/dead", "/files", "/home"


def payload(number: int) -> RawPayload:
    return RawPayload(b"\x0a\x02%02d" % number, Signal.LOGS, Place("01-core0", 1, number))


class Notes:
    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.written: set[int] = set()
        self.identity: str | None = None


def work(disk: FakeDisk, notes: Notes) -> None:
    letters, files = DeadLetters(LETTERS, fs=disk, clock=ManualClock()), FileExporter(FILES, "otlp", fs=disk)
    try:
        files._prepare()
        disk.make_dirs(HOME)
        notes.identity = directory_identity(disk, HOME)
    except PenstockError:
        pass
    for number in range(COUNT):
        try:
            letters.keep("out", payload(number), "no", 1)
            notes.kept.add(number)
        except PenstockError:
            pass
        try:
            files._write(payload(number), payload(number).otlp())
            notes.written.add(number)
        except PenstockError:
            pass


def check(disk: FakeDisk, notes: Notes, why: str) -> None:
    found = {letter.path: letter for letter in DeadLetters(LETTERS, fs=disk).letters()}
    for number in notes.kept:
        path = f"{LETTERS}/out/01-core0-seg{1:016d}-{number:08d}-logs.pb"
        assert disk.read(path) == payload(number).otlp(), why
        assert found[path].reason == "no", why
    for name, _ in disk.list_files(f"{LETTERS}/out"):
        if name.endswith(".pb"):
            assert disk.read(f"{LETTERS}/out/{name}") in [payload(n).otlp() for n in range(COUNT)], why
    names = {name for name, _ in disk.list_files(f"{FILES}/logs")}
    assert {f"01-core0-seg{1:016d}-{number:08d}.pb" for number in notes.written} <= names, why
    for name in names:
        assert disk.read(f"{FILES}/logs/{name}") in [payload(n).otlp() for n in range(COUNT)], why
    if notes.identity is not None:
        assert directory_identity(disk, HOME) == notes.identity, why


def total_calls() -> int:
    disk = FakeDisk(clock=ManualClock())
    work(disk, Notes())
    return len(disk.calls)


@pytest.mark.parametrize("kind", DiskFault)
@pytest.mark.parametrize("survival", Survival)
def test_what_was_reported_as_kept_is_whole_after_any_fault(kind: DiskFault, survival: Survival) -> None:
    for call in range(total_calls()):
        notes = Notes()
        disk = FakeDisk(plan=PlannedFault(call=call, kind=kind), clock=ManualClock())
        try:
            work(disk, notes)
        except PowerCut:
            pass
        after = disk.crash(survival, random.Random(call))
        check(after, notes, f"call {call}, {kind}, {survival}")
