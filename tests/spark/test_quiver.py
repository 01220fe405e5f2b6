"""Segments in a real Spark: as a table and as a stream, acknowledged, run again, and with gaps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from tests import servers
from tests.spark.conftest import finish
from tests.unit.quiver.bundles import SECOND_NS, batch, sealed_of

from penstock.clock import SYSTEM_CLOCK
from penstock.metrics import Registry
from penstock.objects import StoreConfig, open_store
from penstock.quiver import Quiver, QuiverConfig
from penstock.quiver.model import SegmentInfo
from penstock.quiver.offsets.external import ExternalAck, read_external_ack
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.segments.upload import Uploader
from penstock.spark.session.failures import explain
from penstock.spark.sources.quiver_offsets import SegmentGap
from penstock.storage.fs import OsFileSystem


class Directory:
    """A data directory, and a folder for the output of Spark."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark
        self.root = root
        self.path = str(root / "data")
        self.stores: dict[int, SegmentStore] = {}

    def core(self, core_id: int = 0) -> SegmentStore:
        if core_id not in self.stores:
            core = self.root / "data" / f"core_{core_id}"
            self.stores[core_id] = SegmentStore.open(
                OsFileSystem(), str(core / "segments"), str(core / "quarantine"), core_id=core_id
            )
        return self.stores[core_id]

    def add(self, seq: int, *batches: pa.RecordBatch, core: int = 0, slot: int = 63) -> SegmentInfo:
        return self.core(core).write(sealed_of(*batches, first_seq=seq * 10, slot=slot), seq)

    def table(self, **options: str) -> DataFrame:
        return (
            self.spark.read.format("penstock-quiver")
            .options(**{"signal": "other", **options})
            .load(self.path)
        )

    def stream(self, columns: str | None = None, **options: str) -> StreamingQuery:
        rows = self.spark.readStream.format("penstock-quiver").options(**{"signal": "other", **options})
        if columns is not None:
            rows = rows.schema(columns)
        return finish(
            rows.load(self.path)
            .writeStream.format("penstock-delta")
            .option("checkpointLocation", str(self.root / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(self.root / "table"))
        )

    def delta(self) -> list[int]:
        from deltalake import DeltaTable

        return sorted(DeltaTable(str(self.root / "table")).to_pyarrow_table()["n"].to_pylist())

    def forget_last_commit(self) -> None:
        """Restore the state after a crash between the sink's commit and Spark's."""
        commits = [path for path in (self.root / "checkpoint" / "commits").iterdir() if path.name.isdigit()]
        max(commits, key=lambda path: int(path.name)).unlink()


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Directory:
    return Directory(spark, tmp_path)


def rows_of(query: StreamingQuery) -> list[int]:
    return [progress["numInputRows"] for progress in query.recentProgress]


def test_segments_of_all_cores_are_a_table(place: Directory) -> None:
    place.add(1, batch(1, 2), batch(3))
    place.add(2, batch(4))
    place.add(1, batch(5), core=1)
    place.add(3, pa.record_batch({"data": [b"raw"]}), slot=60)
    assert sorted(row.n for row in place.table().collect()) == [1, 2, 3, 4, 5]
    assert [row.n for row in place.table(startingOffsets='{"0": 2, "1": "latest"}').collect()] == [4]
    raw = place.spark.read.format("penstock-quiver").option("slot", "logs_otlp").load(place.path)
    assert [bytes(row.data) for row in raw.collect()] == [b"raw"]


def test_telemetry_comes_with_its_types_or_as_a_view(place: Directory) -> None:
    from penstock.otlp import Signal as OtlpSignal
    from penstock.otlp import schema_of
    from penstock.quiver.model import Signal, flat_slot

    schema = schema_of(OtlpSignal.LOGS)
    values = {
        "time": [SECOND_NS],
        "trace_id": [bytes(range(16))],
        "service_name": ["web"],
        "attributes": [[("k", {"type": 1, "str": "v"})]],
    }
    columns = [pa.array(values.get(field.name, [None]), field.type) for field in schema]
    nullable = pa.schema([field.with_nullable(True) for field in schema])
    place.add(1, pa.RecordBatch.from_arrays(columns, schema=nullable), slot=flat_slot(Signal.LOGS))
    [plain] = (
        place.table(signal="logs")
        .selectExpr("service_name", "trace_id", "attributes['k'].str AS v")
        .collect()
    )
    assert (plain.service_name, bytes(plain.trace_id), plain.v) == ("web", bytes(range(16)), "v")
    [text] = (
        place.table(signal="logs", view="true").selectExpr("trace_id", "attributes_text['k'] AS v").collect()
    )
    assert (text.trace_id, text.v) == (bytes(range(16)).hex(), "v")


def test_a_stream_brings_each_row_into_delta_once_even_if_a_batch_is_run_again(place: Directory) -> None:
    for seq in (1, 2, 3):
        place.add(seq, batch(seq * 10, seq * 10 + 1))
    query = place.stream(maxSegmentsPerTrigger="2")
    assert rows_of(query) == [4, 2]
    place.add(4, batch(40))
    place.forget_last_commit()
    assert rows_of(place.stream(maxSegmentsPerTrigger="2")) == [2, 1]
    assert place.delta() == [10, 11, 20, 21, 30, 31, 40]


def test_a_core_that_appears_later_is_read_from_its_first_segment_on(place: Directory) -> None:
    place.stream(columns="n bigint")
    place.add(1, batch(1))
    place.stream(columns="n bigint")
    place.add(4, batch(2), core=1)
    place.add(5, batch(3), core=1)
    place.stream(columns="n bigint")
    assert place.delta() == [1, 2, 3]


def test_a_subscriber_says_when_it_starts_and_how_far_it_is(place: Directory) -> None:
    fs, core = OsFileSystem(), str(place.root / "data" / "core_0")
    place.add(1, batch(1))
    place.add(2, batch(2))
    place.stream(subscriber="lake", maxSegmentsPerTrigger="1")
    first = read_external_ack(fs, core, "lake")
    assert first in (ExternalAck(subscriber="lake", through=1), ExternalAck(subscriber="lake", through=2))
    place.core().remove(1)
    place.add(3, batch(3))
    place.stream(subscriber="lake")
    later = read_external_ack(fs, core, "lake")
    assert later is not None
    assert later.through >= 2
    assert place.delta() == [1, 2, 3]


def test_removed_segments_end_a_stream_with_a_message_unless_they_are_skipped(place: Directory) -> None:
    place.add(1, batch(1))
    place.stream()
    for seq in (2, 3, 4):
        place.add(seq, batch(seq))
    place.core().remove(2, 3)
    with pytest.raises(Exception, match="segments 2 to 3 of core 0 are gone") as caught:
        place.stream()
    assert isinstance(explain(caught.value), SegmentGap)
    place.stream(onGap="skip")
    assert place.delta() == [1, 4]


def test_removed_segments_that_were_read_are_not_a_gap(place: Directory) -> None:
    place.add(1, batch(1))
    place.stream()
    place.core().remove(1)
    place.stream(columns="n bigint, s string")
    place.add(2, batch(2))
    place.stream()
    assert place.delta() == [1, 2]


def test_another_directory_under_an_old_checkpoint_is_refused(place: Directory) -> None:
    place.add(1, batch(1))
    place.stream()
    place.core().remove(1)
    place.add(1, batch(7))
    with pytest.raises(Exception, match="created again") as caught:
        place.stream()
    assert isinstance(explain(caught.value), SegmentGap)


def test_a_damaged_segment_is_never_read(place: Directory) -> None:
    place.add(1, batch(1))
    path = Path(place.core().path(1))
    path.chmod(0o640)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(Exception, match="checksum"):
        place.table().collect()


def test_a_running_quiver_keeps_what_the_query_has_not_read_and_removes_what_it_has(place: Directory) -> None:
    config = QuiverConfig.from_mapping({"maintenance_interval": "20ms", "ack": {"flush_interval": "20ms"}})
    with Quiver.open(place.path, config) as quiver:
        quiver.register("other")
        for n in range(3):
            quiver.ingest(batch(n))
            quiver.flush()
        place.stream(subscriber="lake")
        for n in range(3, 5):
            quiver.ingest(batch(n))
            quiver.flush()
        for seq in range(1, 6):
            quiver.ack_segment("other", seq)
        assert eventually(lambda: [each.name for each in quiver.subscribers()] == ["lake", "other"])
        assert quiver.stats().segments >= 2, "the query has not read the last two"
        place.stream(subscriber="lake", maxSegmentsPerTrigger="1")
        # Spark commits a micro-batch when the next one begins, so the last one may still be kept.
        assert eventually(lambda: quiver.stats().segments <= 1)
        assert place.delta() == [0, 1, 2, 3, 4]


def test_uploaded_segments_are_read_from_a_real_s3_server(place: Directory) -> None:
    with servers.seaweedfs(place.root / "seaweedfs") as server:
        server.make_bucket("telemetry")
        store = StoreConfig(url="s3://telemetry/edge", options=server.options())
        uploader = Uploader(
            place.core(),
            open_store(store),
            prefix="quiver",
            core_id=0,
            clock=SYSTEM_CLOCK,
            rng=random.Random(1),
            registry=Registry(),
            on_corrupt=lambda info, error: None,
        )
        uploader.submit([place.add(1, batch(1, 2)), place.add(2, batch(3))])
        uploader.drain()
        place.core().remove(1, 2)
        options = {f"store.{name}": value for name, value in server.options().items()}
        rows = place.spark.read.format("penstock-quiver").options(signal="other", **options)
        found = rows.load("s3://telemetry/edge/quiver").collect()
    assert sorted(row.n for row in found) == [1, 2, 3]


def eventually(holds: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Return whether the condition becomes true while another thread works."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
