"""The Spark source's own part, without Spark, over a real server: offsets, ranges, pages, gaps."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Iterator

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.process.topics_server import KEY, Server, serving

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError, InvalidInput
from penstock.ids import mint_ulid
from penstock.spark.sources.offsets import StoredOffset
from penstock.spark.sources.topic import TopicReader, TopicStreamReader
from penstock.spark.sources.topic_client import RecordPage, fetch_page
from penstock.spark.sources.topic_offsets import TopicGap
from penstock.spark.sources.topic_options import TopicAddress, TopicOptions
from penstock.topics.client import Unauthorized
from penstock.topics.client.sync import Client
from penstock.topics.config import TopicConfig
from penstock.topics.errors import TopicNotFound

Row = dict[str, object]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("source") / "data") as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture
def topic() -> str:
    return f"t-{mint_ulid(SYSTEM_CLOCK.now_ms(), random.Random())}"


def options(server: Server, topic: str, **given: str) -> TopicOptions:
    return TopicOptions.parse({"url": server.url, "apiKey": KEY, "topic": topic} | given)


def read(server: Server, topic: str, **given: str) -> list[Row]:
    reader = TopicReader(options(server, topic, **given))
    parts = pickle.loads(pickle.dumps(reader.partitions()))
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def rows_between(reader: TopicStreamReader, start: StoredOffset, end: StoredOffset) -> list[Row]:
    copy = pickle.loads(pickle.dumps(reader))
    parts = reader.partitions(start, end)
    return [row for part in parts for batch in copy.read(part) for row in batch.to_pylist()]


def seqs(rows: list[Row]) -> list[object]:
    return [row["seq"] for row in rows]


def test_everything_is_read_in_order_by_several_tasks(server: Server, client: Client, topic: str) -> None:
    client.write(topic, range(5500), tag="t", node="n")
    reader = TopicReader(options(server, topic, partitions="3"))
    assert [len(part.ranges) for part in reader.partitions()] == [2, 2, 2]  # type: ignore[attr-defined]
    rows = read(server, topic)
    assert [row["data"] for row in rows] == [str(n) for n in range(5500)]
    assert seqs(rows) == [*range(1, 5501)]
    assert (rows[0]["topic"], rows[0]["tag"], rows[0]["node"], rows[0]["meta"]) == (topic, "t", "n", None)


def test_a_range_is_read_and_no_more(server: Server, client: Client, topic: str) -> None:
    client.write(topic, range(20))
    assert seqs(read(server, topic, startingOffsets="5", endingOffsets="8", columns="seq")) == [5, 6, 7]
    assert read(server, topic, startingOffsets="latest") == []
    assert read(server, topic, startingOffsets="4", endingOffsets="4") == []
    with pytest.raises(ConfigError, match="is after endingOffsets 3"):
        read(server, topic, startingOffsets="5", endingOffsets="3")
    with pytest.raises(InvalidInput, match="to 20; 22 is outside"):
        read(server, topic, startingOffsets="22")


def test_records_larger_than_a_page_come_in_several(server: Server, client: Client, topic: str) -> None:
    for _ in range(3):
        client.write(topic, ["x" * 1_000_000] * 7)
    rows = read(server, topic, partitions="1")
    assert seqs(rows) == [*range(1, 22)]
    assert {len(str(row["data"])) for row in rows} == {1_000_002}


def test_several_topics_are_read_side_by_side(server: Server, client: Client, topic: str) -> None:
    client.write(f"{topic}.a", [1, 2])
    client.write(f"{topic}.b", [3])
    rows = read(server, f"{topic}.b,{topic}.a")
    assert [(row["topic"], row["data"]) for row in rows] == [
        (f"{topic}.a", "1"),
        (f"{topic}.a", "2"),
        (f"{topic}.b", "3"),
    ]


def test_deleted_records_are_missing_without_a_word(server: Server, client: Client, topic: str) -> None:
    client.write(topic, range(1500), tag="keep")
    client.write(topic, range(500), tag="drop")
    client.write(topic, range(1500), tag="keep")
    client.delete(topic, match="drop")
    client.delete(topic, before_seq=11)
    wanted = [*range(11, 1501), *range(2001, 3501)]
    assert seqs(read(server, topic)) == wanted
    assert seqs(read(server, topic, startingOffsets="1")) == wanted


def test_a_long_deleted_stretch_is_not_asked_for_page_by_page(
    server: Server, client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.write(topic, range(10), tag="keep")
    for _ in range(5):
        client.write(topic, range(10_000), tag="drop")
    client.write(topic, range(3000), tag="keep")
    client.delete(topic, match="drop")
    asked: list[int] = []

    def counted(address: TopicAddress, name: str, from_seq: int, *given: int, with_meta: bool) -> RecordPage:
        asked.append(from_seq)
        return fetch_page(address, name, from_seq, *given, with_meta=with_meta)

    monkeypatch.setattr("penstock.spark.sources.topic.fetch_page", counted)
    assert seqs(read(server, topic, partitions="1")) == [*range(1, 11), *range(50_011, 53_011)]
    assert len(asked) < 15


def test_a_gap_fails_is_skipped_or_is_one_row(server: Server, client: Client, topic: str) -> None:
    config = TopicConfig(cap_records=10)
    for start in range(0, 5000, 1000):
        client.write(topic, range(start, start + 1000), config=config)
    with pytest.raises(TopicGap, match=r"records 1 to 4990 of .* are gone \(cap\)\. Keep them longer"):
        read(server, topic, startingOffsets="1")
    assert seqs(read(server, topic, startingOffsets="1", onGap="skip")) == [*range(4991, 5001)]
    gap, *rows = read(server, topic, startingOffsets="1", onGap="record")
    assert (gap["seq"], gap["data"], gap["ts"]) == (1, None, None)
    assert gap["meta"] == '{"gap":{"first":1,"last":4990,"reason":"cap"}}'
    assert seqs(rows) == [*range(4991, 5001)]
    assert len(read(server, topic)) == 10, "earliest is what is there"


def test_a_gap_that_opens_after_planning_is_noticed_by_the_task(
    server: Server, client: Client, topic: str
) -> None:
    client.write(topic, range(2500))
    failing, recording = (TopicReader(options(server, topic, onGap=kind)) for kind in ("fail", "record"))
    planned = failing.partitions()
    client.put_topic(topic, TopicConfig(cap_records=700))
    with pytest.raises(TopicGap):
        [*failing.read(planned[0])]
    rows = [row for part in planned for batch in recording.read(part) for row in batch.to_pylist()]
    gaps = [row["meta"] for row in rows if row["data"] is None]
    assert gaps == [
        '{"gap":{"first":1,"last":1000,"reason":"cap"}}',
        '{"gap":{"first":1001,"last":1800,"reason":"cap"}}',
    ]
    assert seqs([row for row in rows if row["data"] is not None]) == [*range(1801, 2501)]


def test_a_stream_takes_what_the_limit_admits_and_then_the_rest(
    server: Server, client: Client, topic: str
) -> None:
    client.write(topic, range(25))
    reader = TopicStreamReader(options(server, topic, maxRecordsPerTrigger="10"))
    assert reader.getDefaultReadLimit() == ReadMaxRows(10)
    offset = reader.initialOffset()
    assert offset == {"next": {topic: 1}}
    seen: list[object] = []
    while (end := reader.latestOffset(offset, ReadMaxRows(10))) is not offset:
        assert seqs(rows_between(reader, offset, end)) == seqs(rows_between(reader, offset, end)), "run again"
        seen += seqs(rows_between(reader, offset, end))
        offset = end
    assert seen == [*range(1, 26)]
    assert offset["next"] == {topic: 26}
    assert reader.reportLatestOffset() == {"next": {topic: 26}}
    reader.commit(offset)
    assert read(server, topic) != [], "reading takes nothing out"


def test_available_now_ends_where_the_topic_ended(server: Server, client: Client, topic: str) -> None:
    client.write(topic, range(5))
    reader = TopicStreamReader(options(server, topic))
    offset = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    client.write(topic, range(5))
    end = reader.latestOffset(offset, ReadAllAvailable())
    assert end["next"] == {topic: 6}
    assert reader.latestOffset(end, ReadAllAvailable()) is end


def test_what_is_gone_does_not_use_up_the_limit(server: Server, client: Client, topic: str) -> None:
    client.write(topic, range(5))
    reader = TopicStreamReader(options(server, topic, onGap="record"))
    offset = reader.latestOffset(reader.initialOffset(), ReadMaxRows(5))
    client.put_topic(topic, TopicConfig(cap_records=4))
    client.write(topic, range(1000))
    end = reader.latestOffset(offset, ReadMaxRows(3))
    assert end["next"] == {topic: 1005}
    rows = rows_between(reader, offset, end)
    assert seqs(rows) == [6, 1002, 1003, 1004]
    assert rows[0]["meta"] == '{"gap":{"first":6,"last":1001,"reason":"cap"}}'


@pytest.mark.parametrize("anew", [2, 5, 8])
def test_a_recreated_topic_is_not_read_further(server: Server, client: Client, topic: str, anew: int) -> None:
    client.write(topic, range(5))
    reader = TopicStreamReader(options(server, topic, onGap="record"))
    offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    client.remove_topic(topic)
    time.sleep(0.005)  # a record of the same number and the same millisecond would be taken for it
    client.write(topic, range(anew))
    with pytest.raises(TopicGap, match="created again"):
        reader.partitions(offset, reader.latestOffset(offset, ReadAllAvailable()))


def test_refusals_of_the_server_are_reported(server: Server, topic: str) -> None:
    with pytest.raises(TopicNotFound):
        read(server, topic)
    with pytest.raises(Unauthorized):
        read(server, topic, apiKey="wrong")
