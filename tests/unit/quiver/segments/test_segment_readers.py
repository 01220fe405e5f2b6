"""Segments are plain Arrow files: any Arrow reader can read them as files, as a dataset, and as Parquet."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from tests.unit.quiver.bundles import SECOND_NS, batch, sealed_of

from penstock.errors import Corrupt, InvalidInput, NotFound
from penstock.objects import MemoryStore
from penstock.otlp import Signal as OtlpSignal
from penstock.otlp import decode, encode
from penstock.quiver.model import SegmentInfo, Signal, flat_slot
from penstock.quiver.segments.source import LocalSegments, StoredSegments, segment_key
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.tools.dataset import scan_segments, select, to_ns, unified_schema
from penstock.quiver.tools.export import export_parquet
from penstock.storage.fs import FileStat, OsFileSystem
from penstock.testing.disk import FakeDisk
from penstock.testing.otlp_kit import telemetry

pytestmark = pytest.mark.unit


class Place:
    """A data directory with one core, on a real disk."""

    def __init__(self, root: Path, core_id: int = 0) -> None:
        self.root = root
        core = root / f"core_{core_id}"
        self.store = SegmentStore.open(
            OsFileSystem(), str(core / "segments"), str(core / "quarantine"), core_id=core_id
        )

    def add(self, seq: int, *batches: pa.RecordBatch, slot: int = 63) -> SegmentInfo:
        return self.store.write(sealed_of(*batches, first_seq=seq * 10, slot=slot), seq)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def logs(*seconds: int, service: str = "web") -> pa.RecordBatch:
    return pa.record_batch(
        {
            "time": pa.array([n * SECOND_NS for n in seconds], pa.timestamp("ns", "UTC")),
            "service_name": pa.array([service] * len(seconds)).dictionary_encode(),
            "attributes": pa.array(
                [[("k", {"type": 1, "str": f"v{n}"})] for n in seconds],
                pa.map_(pa.string(), pa.struct([("type", pa.int8()), ("str", pa.string())])),
            ),
        }
    )


def test_pyarrow_opens_a_segment_and_reads_its_metadata(place: Place) -> None:
    place.add(1, batch(1, 2), batch(3))
    with pa.ipc.open_file(place.store.path(1)) as reader:
        assert reader.num_record_batches == 2
        assert reader.schema.metadata[b"quiver.format"] == b"quiver-segment/1"
        assert reader.schema.metadata[b"quiver.segment_seq"] == b"1"
        assert reader.get_batch_with_custom_metadata(1).custom_metadata[b"quiver.wal_seq"] == b"11"


def test_pyarrow_dataset_reads_a_directory_of_segments(place: Place) -> None:
    place.add(1, batch(1, 2), batch(3))
    place.add(2, batch(4))
    paths = [place.store.path(seq) for seq in (1, 2)]
    assert ds.dataset(paths, format="ipc").to_table()["n"].to_pylist() == [1, 2, 3, 4]


def test_polars_reads_a_segment(place: Place) -> None:
    place.add(1, logs(1, 2), logs(3, service="db"), slot=51)
    frame = pl.read_ipc(place.store.path(1))
    assert frame["service_name"].to_list() == ["web", "web", "db"]


def test_duckdb_queries_a_segment_through_arrow(place: Place) -> None:
    place.add(1, batch(1, 2), batch(3))
    table = pa.ipc.open_file(place.store.path(1)).read_all()
    with duckdb.connect() as connection:
        connection.register("segment", table)
        assert connection.sql("select sum(n) from segment").fetchall() == [(6,)]


def test_a_scan_covers_all_segments_of_a_signal(place: Place) -> None:
    place.add(1, logs(1, 2), slot=51)
    place.add(2, batch(1))
    place.add(3, logs(3, service="db"), slot=51)
    chosen = select(place.store.infos(), signal=Signal.LOGS)
    found = scan_segments([(info, place.store.path(info.seq)) for info in chosen]).to_table()
    assert found["service_name"].to_pylist() == ["web", "web", "db"]


def test_a_scan_returns_only_the_requested_times(place: Place) -> None:
    for seq, seconds in enumerate([(1, 5), (10, 15), (20, 25)], 1):
        place.add(seq, logs(*seconds), slot=51)
    since, until = dt.datetime.fromtimestamp(5, dt.UTC), 20 * SECOND_NS
    chosen = select(place.store.infos(), signal=Signal.LOGS, since=since, until=until)
    assert [info.seq for info in chosen] == [1, 2]
    files = [(info, place.store.path(info.seq)) for info in chosen]
    found = scan_segments(files, since=since, until=until).to_table()
    assert [moment.timestamp() for moment in found["time"].to_pylist()] == [5, 10, 15]


def test_data_without_event_time_is_selected_by_ingestion_time(place: Place) -> None:
    place.add(1, batch(1))
    place.add(2, batch(2))
    assert [info.seq for info in select(place.store.infos(), since=15 * SECOND_NS)] == [2]
    assert [info.seq for info in select(place.store.infos(), until=15 * SECOND_NS)] == [1]


def test_a_scan_unifies_grown_schemas_and_decoded_dictionaries(place: Place) -> None:
    place.add(1, pa.record_batch({"a": pa.array(["x"]).dictionary_encode()}))
    place.add(2, pa.record_batch({"a": ["y"], "b": [1]}))
    files = [(info, place.store.path(info.seq)) for info in place.store.infos()]
    found = scan_segments(files).to_table()
    assert found.to_pydict() == {"a": ["x", "y"], "b": [None, 1]}


def test_a_scan_without_segments_is_an_empty_table() -> None:
    assert scan_segments([]).count_rows() == 0


def test_incompatible_columns_are_named() -> None:
    with pytest.raises(InvalidInput, match="cannot be combined into one table"):
        unified_schema([pa.schema([("a", pa.int64())]), pa.schema([("a", pa.list_(pa.string()))])])


def test_a_datetime_without_a_time_zone_is_refused() -> None:
    with pytest.raises(InvalidInput, match="time zone"):
        to_ns(dt.datetime(2026, 1, 1))  # noqa: DTZ001
    assert to_ns(dt.datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=dt.UTC)) == SECOND_NS + 5000


def test_a_reader_during_writes_sees_all_cores_and_changes_nothing(tmp_path: Path) -> None:
    one, two = Place(tmp_path, 0), Place(tmp_path, 1)
    one.add(1, batch(1))
    two.add(1, batch(2))
    source = LocalSegments(str(tmp_path))
    assert [(info.core_id, info.seq) for info in source.infos()] == [(0, 1), (1, 1)]
    assert source.reader(source.infos()[1]).batch(0).equals(batch(2))
    two.add(2, batch(3))
    one.store.remove(1)
    gone = source.infos()[0]
    assert [(info.core_id, info.seq) for info in source.infos()] == [(1, 1), (1, 2)]
    assert gone.core_id == 1


def test_a_reader_distinguishes_a_removed_segment_from_a_damaged_one(place: Place) -> None:
    one, two = place.add(1, batch(1)), place.add(2, batch(2))
    source = LocalSegments(str(place.root))
    path = Path(place.store.path(2))
    path.chmod(0o640)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(Corrupt):
        source.reader(two)
    place.store.remove(1)
    with pytest.raises(NotFound):
        source.reader(one)


def test_a_reader_skips_a_damaged_sidecar_and_reports_it(place: Place) -> None:
    place.add(1, batch(1))
    place.add(2, batch(2))
    sidecar = place.root / "core_0" / "segments" / "seg-0000000000000001.meta.json"
    sidecar.chmod(0o640)
    sidecar.write_bytes(b"{}")
    source = LocalSegments(str(place.root))
    assert [info.seq for info in source.infos()] == [2]
    assert list(source.damaged) == ["core_0/segments/seg-0000000000000001.meta.json"]


async def test_uploaded_copies_are_read_like_local_ones(place: Place) -> None:
    place.add(1, batch(1), batch(2))
    store = MemoryStore()
    for name in ("seg-0000000000000001.arrow", "seg-0000000000000001.meta.json"):
        data = (place.root / "core_0" / "segments" / name).read_bytes()
        await store.put(segment_key("edge/a", 0, name), data)
    import asyncio

    source = StoredSegments(store, "edge/a")
    infos = await asyncio.to_thread(source.infos)
    assert infos == place.store.infos()
    reader = await asyncio.to_thread(source.reader, infos[0])
    assert reader.batch(1).equals(batch(2))


def test_export_writes_one_parquet_file_per_segment_and_continues_where_it_stopped(
    place: Place, tmp_path: Path
) -> None:
    place.add(1, logs(1, 2), logs(3, service="db"), slot=51)
    source, target, fs = LocalSegments(str(place.root)), tmp_path / "out", OsFileSystem()
    report = export_parquet(source, source.infos(), str(target), fs=fs)
    assert (report.files, report.rows, report.kept, report.gone) == (1, 3, 0, 0)
    file = target / "logs_flat" / "core-0-seg-0000000000000001.parquet"
    assert report.byte_count == file.stat().st_size
    table = pq.read_table(file)
    assert table["service_name"].to_pylist() == ["web", "web", "db"]
    assert table.schema.field("time").type == pa.timestamp("ns", "UTC")
    place.add(2, logs(9), slot=51)
    again = export_parquet(source, source.infos(), str(target), fs=fs)
    assert (again.files, again.kept) == (1, 1)
    with duckdb.connect() as connection:
        rows = connection.sql(f"select count(*) from '{target}/logs_flat/*.parquet'").fetchall()
    assert rows == [(4,)]


def test_export_can_shorten_times_for_tools_that_support_only_microseconds(
    place: Place, tmp_path: Path
) -> None:
    place.add(1, logs(1), slot=51)
    source = LocalSegments(str(place.root))
    export_parquet(source, source.infos(), str(tmp_path / "out"), fs=OsFileSystem(), timestamps="us")
    file = tmp_path / "out" / "logs_flat" / "core-0-seg-0000000000000001.parquet"
    assert pq.read_table(file).schema.field("time").type == pa.timestamp("us", "UTC")


def test_export_counts_segments_that_were_removed_before_it_read_them(place: Place, tmp_path: Path) -> None:
    place.add(1, batch(1))
    source = LocalSegments(str(place.root))
    infos = source.infos()
    place.store.remove(1)
    report = export_parquet(source, infos, str(tmp_path / "out"), fs=OsFileSystem())
    assert (report.files, report.gone) == (0, 1)


def test_export_can_show_telemetry_as_text(place: Place, tmp_path: Path) -> None:
    found = decode(telemetry(OtlpSignal.TRACES, items=20), OtlpSignal.TRACES).batch
    place.add(1, found, slot=50)
    place.add(2, batch(1))
    source = LocalSegments(str(place.root))
    export_parquet(source, source.infos(), str(tmp_path / "out"), fs=OsFileSystem(), view=True)
    spans = pq.read_table(tmp_path / "out" / "spans_flat" / "core-0-seg-0000000000000001.parquet")
    assert spans["trace_id"].to_pylist() == [each.hex() for each in found["trace_id"].to_pylist()]
    assert spans.schema.field("attributes_text").type == pa.map_(pa.string(), pa.string())
    assert spans.schema.field("start_time").type == pa.timestamp("us", "UTC")
    plain = tmp_path / "out" / "other" / "core-0-seg-0000000000000002.parquet"
    assert pq.read_table(plain)["n"].to_pylist() == [1]


@pytest.mark.parametrize("signal", list(OtlpSignal))
def test_telemetry_survives_a_round_trip_through_segments_and_parquet(
    place: Place, tmp_path: Path, signal: OtlpSignal
) -> None:
    bundles = [decode(telemetry(signal, items=20, seed=seed), signal).batch for seed in range(3)]
    place.add(1, *bundles, slot=flat_slot(Signal(signal.value)))
    read_back = list(place.store.batches(1))
    assert [each.to_pylist() for each in read_back] == [each.to_pylist() for each in bundles]
    assert [encode(each, signal) for each in read_back] == [encode(each, signal) for each in bundles]
    info = place.store.get(1)
    assert info.event_ns_min is not None
    source = LocalSegments(str(place.root))
    export_parquet(source, source.infos(), str(tmp_path / "out"), fs=OsFileSystem())
    [file] = (tmp_path / "out").glob("*/*.parquet")
    assert pq.read_table(file).num_rows == info.item_count


class Late(FakeDisk):
    """A disk whose listings miss some files that were created during the listing."""

    def __init__(self) -> None:
        super().__init__()
        self.missed: list[str] = []

    def list_files(self, path: str) -> list[tuple[str, FileStat]]:
        missed = self.missed.pop(0) if self.missed else "nothing"
        return [found for found in super().list_files(path) if missed not in found[0]]


@pytest.mark.parametrize(
    ("missed", "listed"),
    [
        (["nothing"], [1, 2, 3, 4]),
        (["0003."], [1, 2, 3, 4]),
        (["0004."], [1, 2, 3]),
    ],
)
def test_a_listing_that_missed_a_segment_before_another_is_repeated(
    missed: list[str], listed: list[int]
) -> None:
    disk = Late()
    store = SegmentStore.open(disk, "/q/core_0/segments", "/q/core_0/quarantine")
    for seq in range(1, 5):
        store.write(sealed_of(batch(seq)), seq)
    source = LocalSegments("/q", disk)
    disk.missed = missed
    assert [info.seq for info in source.infos()] == listed


def test_segments_beyond_the_first_listing_are_left_for_the_next_call(place: Place) -> None:
    class Growing(OsFileSystem):
        """A disk on which a segment is committed between the first listing and the second."""

        listings = 0

        def list_files(self, path: str) -> list[tuple[str, FileStat]]:
            self.listings += 1
            if self.listings == 2:
                place.add(9, batch(9))
            return super().list_files(path)

    for seq in (1, 3):
        place.add(seq, batch(seq))
    source = LocalSegments(str(place.root), Growing())
    assert [info.seq for info in source.infos()] == [1, 3]
    assert [info.seq for info in source.infos()] == [1, 3, 9]
