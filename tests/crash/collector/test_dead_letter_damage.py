"""Every durable file of a collector, damaged in every way: it is whole, or its damage is reported."""

from __future__ import annotations

import logging
import random

import pytest
from tests.crash.damage import Damage, Tally, damages

from penstock.collector.dead_letters import DeadLetters, replay
from penstock.collector.outcome import Outcome, delivered
from penstock.collector.payload import Payload, RawPayload
from penstock.collector.pipeline import directory_identity
from penstock.errors import Corrupt
from penstock.otlp.schema import Signal
from penstock.testing.clock import ManualClock
from penstock.testing.disk import FakeDisk
from penstock.testing.otlp_kit import telemetry

ROOT = "/dead_letters"
REQUESTS = {signal: telemetry(signal, items=2) for signal in (Signal.LOGS, Signal.TRACES)}


class Taking:
    """A destination that takes everything."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    async def start(self) -> None: ...

    async def send(self, payload: Payload) -> Outcome:
        self.taken.append(payload.otlp())
        return delivered()

    async def close(self) -> None: ...


def disk_of(files: dict[str, bytes], root: str = ROOT) -> FakeDisk:
    disk = FakeDisk(clock=ManualClock())
    for name, raw in files.items():
        path = f"{root}/{name}"
        disk.make_dirs(path.rpartition("/")[0])
        file = disk.create(path)
        if raw:
            file.write([raw])
        file.close()
    return disk


def kept() -> dict[str, bytes]:
    disk = FakeDisk(clock=ManualClock())
    letters = DeadLetters(ROOT, fs=disk, clock=ManualClock())
    for exporter in ("one", "two"):
        for signal, request in REQUESTS.items():
            letters.keep(exporter, RawPayload(request, signal), "no", 1)
    return {name: disk.read(f"{ROOT}/{name}") for name, _ in disk.list_files(ROOT)}


async def check(files: dict[str, bytes], damage: Damage) -> tuple[str, str | None]:
    left = {name: raw for name, raw in files.items() if name != damage.file}
    if damage.data is not None:
        left[damage.file] = damage.data
    store, destination = DeadLetters(ROOT, fs=disk_of(left), clock=ManualClock()), Taking()
    reported = [
        letter for letter in store.letters() if letter.damage or "missing or damaged" in letter.reason
    ]
    await replay(list(store.letters()), store, destination)
    if not set(destination.taken) <= set(REQUESTS.values()):
        return "wrong", "a damaged request was sent"
    if len(destination.taken) < len(files) // 2 and not reported:
        return "wrong", "a request is gone without a word"
    if len(destination.taken) < len(files) // 2:
        return "lost and reported", None
    return ("reported" if reported else "complete"), None


async def test_damage_to_any_dead_letter_is_reported_and_no_damaged_request_is_sent() -> None:
    files = kept()
    tally = Tally("Collector")
    for file, raw in files.items():
        other = [data for name, data in files.items() if name.endswith(file[-5:])]
        for damage in damages(file, raw, random.Random(1).sample(other, 1)):
            tally.note(damage, *await check(files, damage))
    tally.finish(but={"collector.id"})


def test_damage_to_the_identity_of_a_directory_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    segment = {"core_0/segments/seg-0000000000000001.arrow": b"ARROW1"}
    disk = disk_of(segment, "/store")
    identity = directory_identity(disk, "/store", clock=ManualClock())
    raw = disk.read("/store/collector.id")
    tally = Tally("Collector")
    for damage in damages("collector.id", raw, []):
        left = segment if damage.data is None else segment | {"collector.id": damage.data}
        caplog.clear()
        wrong, outcome = None, "complete"
        try:
            found = directory_identity(disk_of(left, "/store"), "/store", clock=ManualClock())
        except Corrupt:
            outcome = "refused"
        else:
            if found != identity:
                is_told = any(one.levelno >= logging.WARNING for one in caplog.records)
                outcome = "reported" if is_told else "wrong"
                wrong = None if is_told else "the directory has another identity without a word"
        tally.note(damage, outcome, wrong)
    tally.finish(but={"<exporter>/<place>-<signal>.pb", "<exporter>/<place>-<signal>.json"})
    assert tally.outcomes["complete"] == 0
