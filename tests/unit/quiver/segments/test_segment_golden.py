"""Segments written by earlier versions stay readable. Golden files are only added to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.quiver.model import Signal
from penstock.quiver.segments.file import BundleMetadata
from penstock.quiver.segments.store import SegmentStore
from penstock.storage.fs import OsFileSystem

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parents[3] / "golden" / "quiver" / "segments"
EVENT_NS = 1_700_000_000_000_000_001


def log_batch(first: int) -> pa.RecordBatch:
    """Return a batch of the golden segment."""
    rows = range(first, first + 3)
    return pa.record_batch(
        {
            "time": pa.array([EVENT_NS + n for n in rows], pa.timestamp("ns", "UTC")),
            "service_name": pa.array([f"svc-{n}" for n in rows]).dictionary_encode(),
            "attributes": pa.array([[("k", n)] for n in rows], pa.map_(pa.string(), pa.int64())),
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    shutil.copytree(GOLDEN, tmp_path / "segments")
    return SegmentStore.open(
        OsFileSystem(), str(tmp_path / "segments"), str(tmp_path / "quarantine"), core_id=3, verify="full"
    )


def test_the_first_format_is_read(store: SegmentStore) -> None:
    assert store.damage == []
    [info] = store.infos()
    assert (info.seq, info.signal, info.slot, info.core_id) == (7, Signal.LOGS, 51, 3)
    assert (info.bundle_count, info.item_count, info.wal_seq_min, info.wal_seq_max) == (2, 6, 11, 12)
    assert (info.event_ns_min, info.event_ns_max) == (EVENT_NS, EVENT_NS + 12)
    assert info.schema_hash == "cabeb68b049e87dae618656e035be643e976068ecb1001f12d8cd11c4586ccba"
    assert [each.to_pylist() for each in store.batches(7)] == [
        log_batch(0).to_pylist(),
        log_batch(10).to_pylist(),
    ]
    assert store.bundle_metadata(7)[1] == BundleMetadata(wal_seq=12, ingest_ns=12_000_000_000, items=3)


def test_a_lost_sidecar_of_the_first_format_is_rebuilt(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    shutil.copy(GOLDEN / "seg-0000000000000007.arrow", tmp_path / "segments")
    store = SegmentStore.open(
        OsFileSystem(), str(tmp_path / "segments"), str(tmp_path / "quarantine"), rebuild=True
    )
    assert [info.seq for info in store.infos()] == [7]
