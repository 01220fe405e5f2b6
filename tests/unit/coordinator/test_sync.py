"""The blocking forms have all calls of the async classes, for any thread, on one loop."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.unit.coordinator.doubles import WordDelta, WordFlusher

from penstock import coordinator, timeseries, vector
from penstock.blocking import loop_thread
from penstock.coordinator import (
    ApplyError,
    Backpressure,
    CoordinatorConfig,
    Durability,
    FlushEvent,
    Shutdown,
    StorageRead,
    sync,
)
from penstock.coordinator.slate import SlateStorage
from penstock.errors import Rejected
from penstock.metrics import Registry
from penstock.testing.memory_storage import MemoryDisk
from penstock.timeseries import Labels, Samples, Series
from penstock.timeseries.sync import TimeSeries
from penstock.vector import Vector, VectorConfig
from penstock.vector.sync import VectorStore

APPLIED, FLUSHED, DURABLE = Durability
Words = sync.WriteCoordinator[str, WordDelta, StorageRead]
OF_THE_LOOP = {
    *(
        "start",
        "settle",
        "fail",
        "accept",
        "refuse",
        "take",
        "admit",
        "turn_away",
        "drop",
        "offer",
        "end",
    ),
    *("entered", "size"),
}
"""Methods that only the coordinator calls."""


@pytest.mark.parametrize(
    ("twin", "original"),
    [
        (sync.WriteCoordinator, coordinator.WriteCoordinator),
        (sync.WriteHandle, coordinator.WriteHandle),
        (sync.FlushHandle, coordinator.FlushHandle),
        (sync.Channel, coordinator.Channel),
        (sync.Subscription, coordinator.Subscription),
        (TimeSeries, timeseries.TimeSeries),
        (VectorStore, vector.VectorStore),
    ],
    ids=lambda one: f"{one.__module__}.{one.__name__}",
)
def test_a_twin_has_every_call_of_its_original_with_its_parameters(twin: type, original: type) -> None:
    for name, member in inspect.getmembers(original):
        told = original is coordinator.Subscription and name == "failure"  # raised by the iteration itself
        if name.startswith("_") or name in OF_THE_LOOP or told:
            continue
        assert hasattr(twin, name), name
        if inspect.isfunction(member):
            wanted = set(inspect.signature(member).parameters) - {"timeout_s"}
            assert wanted <= set(inspect.signature(getattr(twin, name)).parameters), name


def opened(disk: MemoryDisk | None = None, **config: object) -> Words:
    async def build() -> coordinator.WriteCoordinator[str, WordDelta, StorageRead]:
        storage = (disk or MemoryDisk()).open()
        return coordinator.WriteCoordinator(
            WordDelta,
            WordFlusher(storage),
            image=0,
            snapshot=storage.seen,
            config=CoordinatorConfig.from_mapping({"sync_mode": "every_flush", **config}),
            registry=Registry(),
        )

    return sync.WriteCoordinator.open(build)


def test_threads_share_a_coordinator_and_every_write_has_its_place() -> None:
    disk = MemoryDisk()
    with opened(disk, flush_interval=0) as words:
        epochs: list[int] = []

        def write(name: str) -> None:
            handle = words.write(name)
            handle.wait(DURABLE, timeout_s=10)
            epochs.append(handle.epoch())

        threads = [threading.Thread(target=write, args=(f"w{number}",)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(epochs) == list(range(1, 17))
        assert words.watermark(DURABLE) == 16
    assert len(disk.persisted) == 17


def test_errors_arrive_as_they_are() -> None:
    words = opened(queue_capacity=1)
    with pytest.raises(ApplyError, match="is no word"):
        words.write("bad").epoch(timeout_s=10)
    side = words.channel("side", capacity=1)
    side.pause()
    handle = side.try_write("held")
    with pytest.raises(Backpressure):
        side.try_write("more")
    with pytest.raises(TimeoutError):
        handle.wait(APPLIED, timeout_s=0.01)
    side.resume()
    assert handle.result(timeout_s=10) == 0
    words.flush(durable=True).wait(DURABLE, timeout_s=10)
    words.close()
    with pytest.raises(Shutdown):
        words.write("late")


def test_a_subscription_follows_the_flushes() -> None:
    words = opened()
    events = words.subscribe()
    words.write("a").wait(APPLIED, timeout_s=10)
    words.flush().wait(timeout_s=10)
    event = next(events)
    assert isinstance(event, FlushEvent)
    assert event.epoch_range.hi == 1
    words.close()
    assert list(events) == []


def test_a_call_from_the_loop_itself_is_refused() -> None:
    words = opened()

    async def inside() -> None:
        words.write("a")

    with pytest.raises(Rejected, match="inside the event loop"):
        loop_thread().run(inside())
    words.abort()


def test_time_series_are_written_and_asked_for_without_a_loop(tmp_path: Path) -> None:
    now_ms = int(time.time() * 1000)
    labels = Labels.of({"__name__": "up", "job": "a"})
    with TimeSeries.open(tmp_path / "metrics") as database:
        write = Series(labels=labels, samples=Samples.of([(now_ms, 3.0)]))
        database.write([write], sequence=4, source="a queue").wait(DURABLE, timeout_s=20)
        assert database.query("sum(up)", now_ms).series[0].values.tolist() == [3.0]
        assert database.series() == {labels}
        assert database.label_values("job") == {"a"}
        assert len(database.buckets) == 1
        assert database.unstored == 0
        assert database.stored_sequence() == 4
    with TimeSeries.open(tmp_path / "metrics") as database:
        assert database.stored_position() == coordinator.Position(4, "a queue")


def test_vectors_are_written_and_found_without_a_loop(tmp_path: Path) -> None:
    config = VectorConfig(store=tmp_path.as_uri(), dimensions=2, flush_interval="10ms")
    with VectorStore.open(config) as store:
        store.upsert([Vector("a", [1, 0]), Vector("b", [0, 1])]).wait(DURABLE, timeout_s=20)
        store.delete(["b"])
        store.flush()
        assert [hit.id for hit in store.search([1, 0], k=5)] == ["a"]
        found = store.get("a")
        assert found is not None
        assert found.vector.tolist() == [1, 0]
        assert len(store) == 1


def test_the_storage_is_opened_on_the_loop(tmp_path: Path) -> None:
    async def build() -> coordinator.WriteCoordinator[str, WordDelta, StorageRead]:
        storage = await SlateStorage.open(tmp_path.as_uri(), "words")
        return coordinator.WriteCoordinator(
            WordDelta, WordFlusher(storage), image=0, snapshot=await storage.snapshot(), registry=Registry()
        )

    with sync.WriteCoordinator.open(build) as words:
        words.write("kept")
        words.flush(durable=True).wait(DURABLE, timeout_s=20)
        assert words.view().epoch == 1


FORK = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from penstock.coordinator.slate import SlateStore
from penstock.errors import Rejected, Unavailable
from penstock.vector import VectorConfig
from penstock.vector.sync import VectorStore

def ended(child):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(child())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def opens():
    with VectorStore.open(VectorConfig(dimensions=2)) as store:
        return len(store)

def is_told():
    try:
        held.flush()
        return 3
    except Rejected:
        pass
    try:
        return 4 + opens()
    except Unavailable as error:
        return 0 if "forked" in str(error) and "spawn" in str(error) else 5

SlateStore("memory:///")
assert ended(opens) == 0
held = VectorStore.open(VectorConfig(dimensions=2))
code = ended(is_told)
held.close()
sys.exit(code)
"""


def test_a_database_in_a_child_of_its_user_says_why_it_cannot_work() -> None:
    source = Path(coordinator.__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=50, cwd=source, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
