"""Copies of segments: data before sidecar, each once, retried after failures, never blocking the engine."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from tests.unit.quiver.bundles import batch, sealed_of

from penstock.blocking import loop_thread
from penstock.errors import Unavailable
from penstock.metrics import Registry
from penstock.objects import Data, MemoryStore, Version
from penstock.quiver.segments.source import StoredSegments
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.segments.upload import Uploader
from penstock.testing.clock import ManualClock
from penstock.testing.disk import FakeDisk

pytestmark = pytest.mark.unit


class Shelf(MemoryStore):
    """A store that records every put and fails the requested ones."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[str] = []
        self.refuse: set[int] = set()

    async def put(self, key: str, data: Data) -> Version:
        number = len(self.puts)
        self.puts.append(key.rpartition("/")[2])
        if number in self.refuse:
            raise Unavailable("the store is away")
        return await super().put(key, data)


class Bench:
    def __init__(self) -> None:
        self.disk = FakeDisk()
        self.segments = SegmentStore.open(self.disk, "/q/segments", "/q/quarantine")
        self.shelf = Shelf()
        self.registry = Registry()
        self.corrupt: list[int] = []
        self.uploader = self.restart()

    def restart(self) -> Uploader:
        self.uploader = Uploader(
            self.segments,
            self.shelf,
            prefix="quiver",
            core_id=0,
            clock=ManualClock(),
            rng=random.Random(1),
            registry=self.registry,
            on_corrupt=lambda info, error: self.corrupt.append(info.seq),
        )
        return self.uploader

    def add(self, seqs: Iterable[int]) -> None:
        self.uploader.submit(self.segments.write(sealed_of(batch(seq)), seq) for seq in seqs)

    def read_back(self) -> list[int]:
        source = StoredSegments(self.shelf, "quiver")
        infos = source.infos()
        for info in infos:
            assert source.reader(info).batch(0).equals(batch(info.seq))
        return [info.seq for info in infos]


def names(seq: int) -> list[str]:
    return [f"seg-{seq:016d}.arrow", f"seg-{seq:016d}.meta.json"]


def test_segments_are_uploaded_in_order_data_before_sidecar() -> None:
    bench = Bench()
    bench.add((1, 2))
    assert not bench.uploader.is_uploaded(1)
    bench.uploader.drain()
    assert bench.shelf.puts == names(1) + names(2)
    assert bench.uploader.is_uploaded(1)
    assert bench.uploader.is_uploaded(2)
    assert bench.read_back() == [1, 2]
    assert bench.registry.value("quiver.upload.segments_total") == 2


@pytest.mark.parametrize("refused", [0, 1, 2, 3])
def test_a_failed_upload_is_repeated_and_counts_only_then(refused: int) -> None:
    bench = Bench()
    bench.shelf.refuse = {refused}
    bench.add((1, 2))
    with pytest.raises(Unavailable):
        bench.uploader.drain()
    assert not bench.uploader.is_uploaded(2)
    assert bench.uploader.is_uploaded(1) == (refused > 1)
    assert bench.read_back() == ([1] if refused > 1 else [])
    bench.uploader.drain()
    assert bench.read_back() == [1, 2]


def test_after_a_start_only_missing_segments_are_uploaded() -> None:
    bench = Bench()
    bench.add((1, 2))
    bench.uploader.drain()
    bench.shelf.puts.clear()
    bench.restart()
    bench.segments.write(sealed_of(batch(3)), 3)
    bench.uploader.submit(bench.segments.infos())
    bench.uploader.drain()
    assert bench.shelf.puts == names(3)
    assert all(bench.uploader.is_uploaded(seq) for seq in (1, 2, 3))


def test_a_copy_of_another_directory_is_replaced_and_not_trusted() -> None:
    bench = Bench()
    bench.add((1,))
    bench.uploader.drain()
    other = Bench()
    other.shelf = bench.shelf
    other.restart()
    other.uploader.submit([other.segments.write(sealed_of(batch(1), batch(1)), 1)])
    other.uploader.drain()
    assert StoredSegments(bench.shelf, "quiver").infos()[0].bundle_count == 2


def test_a_segment_that_was_removed_meanwhile_is_skipped() -> None:
    bench = Bench()
    bench.add((1, 2))
    bench.segments.remove(1)
    bench.uploader.drain()
    assert bench.read_back() == [2]
    assert not bench.uploader.is_uploaded(1)


def test_a_damaged_segment_is_reported_and_only_the_next_one_is_uploaded() -> None:
    bench = Bench()
    bench.segments.write(sealed_of(batch(1)), 1)
    bench.disk.truncate("/q/segments/seg-0000000000000001.arrow", 64)
    bench.segments._verified.clear()
    bench.uploader.submit(bench.segments.infos())
    bench.add((2,))
    bench.uploader.drain()
    assert bench.shelf.puts == names(2)
    assert bench.corrupt == [1]
    assert not bench.uploader.is_uploaded(1)


def test_the_thread_uploads_submitted_segments() -> None:
    bench = Bench()
    bench.uploader.start()
    bench.add((1, 2, 3))
    bench.uploader.drain(timeout_s=30)
    bench.uploader.stop()
    assert bench.read_back() == [1, 2, 3]
    assert bench.uploader.pending == 0


def test_a_forgotten_segment_no_longer_counts() -> None:
    bench = Bench()
    bench.add((1,))
    bench.uploader.drain()
    bench.uploader.forget(1)
    assert not bench.uploader.is_uploaded(1)
    assert [found.size > 0 for found in loop_thread().run(bench.shelf.list("quiver"))] == [True, True]
