from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.spark.sources.topic_options import TopicOptions
from penstock.topics.errors import InvalidRequest


def test_options_are_read_with_any_case_and_the_key_stays_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOPICS_URL", raising=False)
    monkeypatch.setenv("TOPICS_API_KEY", "s3cret")
    options = TopicOptions.parse(
        {
            "TOPIC": "b, a",
            "columns": "seq,data,meta",
            "startingoffsets": '{"a": 3, "b": "latest"}',
            "max_records_per_trigger": "10",
            "onGap": "record",
            "partitions": "3",
        }
    )
    assert options.topics == ("a", "b")
    assert options.columns == ("seq", "data", "meta")
    assert (options.starting, options.ending) == ({"a": 3, "b": "latest"}, "latest")
    assert (options.records_per_trigger, options.on_gap, options.tasks) == (10, "record", 3)
    assert (options.address.url, options.address.key) == ("http://127.0.0.1:4000", "s3cret")
    assert "s3cret" not in repr(options)
    assert TopicOptions.parse({"path": "a", "apiKey": "own"}).address.key == "own"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "give the topic once"),
        ({"topic": "a", "path": "a"}, "give the topic once"),
        ({"topic": " , "}, "topic: expected a name"),
        ({"topic": "a,a"}, "names a topic twice"),
        ({"topic": "a", "startOffsets": "1"}, "startingOffsets"),
        ({"topic": "a", "onGap": "ignore"}, "onGap: expected fail, skip, record"),
        ({"topic": "a", "onGap": "record", "columns": "seq"}, "add data, meta"),
        ({"topic": "a", "columns": "sequence"}, "seq"),
        ({"topic": "a", "columns": "seq,seq"}, "twice"),
        ({"topic": "a", "columns": ","}, "found nothing"),
        ({"topic": "a", "partitions": "0"}, "partitions: expected"),
        ({"topic": "a", "maxRecordsPerTrigger": "many"}, "maxRecordsPerTrigger: expected"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        TopicOptions.parse(given)
    with pytest.raises(InvalidRequest):
        TopicOptions.parse({"topic": "no spaces"})
