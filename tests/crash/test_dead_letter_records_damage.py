"""Dead letters of single records, damaged in every way: whole, or refused by readers and `fsck --deep`."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from tests.crash.damage import Tally, damages, files_below, names_in, replace_file

from penstock.buffer import ProducerConfig
from penstock.buffer.fsck import audit
from penstock.buffer.inspect import QueueReader
from penstock.errors import Corrupt
from penstock.findings import Severity
from penstock.objects import LocalStore
from penstock.services.feed import DeadLetterFile, DeadLetterRecord, read_dead_letters, store_dead_letters
from penstock.services.relay import RelayDeadLetter, RelayTarget
from penstock.testing import ManualClock
from penstock.topics import UnreadableRecord

pytestmark = pytest.mark.crash

read_relayed = msgspec.json.Decoder(RelayDeadLetter).decode

RECORDS = "<folder>/manifest.dead/records/<number>.json"
RELAY = "<folder>/manifest.dead/relay/<name>/<number>.json"


async def problems(root: Path) -> set[str]:
    store = LocalStore(root)
    found = await audit(QueueReader(store, "ingest/manifest"), "ingest", deep=True)
    await store.close()
    return {finding.subject for finding in found if finding.severity is Severity.PROBLEM}


async def test_damage_to_the_letters_of_single_records_is_reported(tmp_path: Path) -> None:
    store, clock = LocalStore(tmp_path), ManualClock()
    target = RelayTarget(ProducerConfig(store=store), "relay", clock=clock, rng=random.Random(1))
    for number in range(2):
        bad = UnreadableRecord(seq=number, ts_ms=clock.now_ms(), reason="too deep")
        await target.set_aside("t", bad, b"[" * 200)
        record = DeadLetterRecord(index=number, reason="no", data=b"x" * 90)
        file = DeadLetterFile(sequence=number, location="a", recorded_at_ms=1, records=[record])
        await store_dead_letters(store, "ingest/manifest", file)
    await store.close()
    files = {name: raw for name, raw in files_below(tmp_path).items() if "/manifest.dead/" in name}
    assert len(files) == 4
    assert not await problems(tmp_path)
    tally = Tally("Queue")
    for file, raw in files.items():
        other = [data for name, data in files.items() if name[:25] == file[:25] and name != file]
        for damage in damages(file, raw, other):
            (tmp_path / file).write_bytes(raw)
            replace_file(tmp_path, damage)
            outcome, wrong = "missing", None
            if damage.data is not None:
                try:
                    read = (
                        read_dead_letters
                        if "/records/" in file
                        else msgspec.json.Decoder(RelayDeadLetter).decode
                    )
                    read(damage.data)
                    outcome = "complete"
                except (Corrupt, msgspec.MsgspecError):
                    outcome = "refused"
                    wrong = None if file in await problems(tmp_path) else "fsck is clean"
            tally.note(damage, outcome, wrong)
            (tmp_path / file).write_bytes(raw)
    tally.finish(but=names_in("Queue").keys() - {RECORDS, RELAY})
    assert tally.outcomes["refused"] > 40
