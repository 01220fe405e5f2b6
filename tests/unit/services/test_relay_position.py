"""The position of a relay in its queue, and its reports about a rolled back queue."""

from __future__ import annotations

import logging
import random

import pytest
from tests.unit.services.test_relay_batch import draft, page

from penstock.buffer import ProducerConfig
from penstock.errors import Corrupt
from penstock.objects import MemoryStore
from penstock.services.relay import RelayTarget
from penstock.testing import ManualClock

MANIFEST = "ingest/manifest"


def target(store: MemoryStore) -> RelayTarget:
    config = ProducerConfig(store=store)
    return RelayTarget(config, "relay", clock=ManualClock(), rng=random.Random(1))


@pytest.mark.parametrize("lost", ["manifest and book", "older"])
async def test_a_rolled_back_queue_is_reported(lost: str, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore("relay")
    made = draft()
    made.add(page(1, 4))
    await target(store).append(made, None)
    older = {info.key: bytes((await store.get(info.key)).data) for info in await store.list("")}
    more = draft(after=4)
    more.add(page(5, 9))
    await target(store).append(more, 4)
    assert (await target(store).position("t")).seq == 9
    assert not caplog.records
    if lost == "older":
        for key in (MANIFEST, f"{MANIFEST}.txn"):
            await store.put(key, older[key])
    else:
        await store.delete_many([MANIFEST, f"{MANIFEST}.txn"])
    position = await target(store).position("t")
    assert position.seq == (4 if lost == "older" else None)
    [warning] = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "9 was relayed before" in warning.getMessage()


@pytest.mark.parametrize("lost", ["missing", "older"])
async def test_a_queue_rolled_back_without_its_transaction_log_is_refused(lost: str) -> None:
    store = MemoryStore("relay")
    made = draft()
    made.add(page(1, 4))
    await target(store).append(made, None)
    older = bytes((await store.get(MANIFEST)).data)
    more = draft(after=4)
    more.add(page(5, 9))
    await target(store).append(more, 4)
    if lost == "older":
        await store.put(MANIFEST, older)
    else:
        await store.delete_many([MANIFEST])
    proof = {"older": "has committed version 9, but the queue ends with its version 4"}.get(
        lost, r"ends before number 0, and batch 1 .* was removed or replaced by an older copy"
    )
    with pytest.raises(Corrupt, match=proof):
        await target(store).position("t")
