from __future__ import annotations

import datetime

import pytest

from penstock.buffer import CompressionType, ConsumerConfig, ProducerConfig
from penstock.buffer.config import config_from_mapping
from penstock.errors import ConfigError


@pytest.mark.parametrize("interval", ["100ms", 0.1, datetime.timedelta(milliseconds=100)])
def test_a_duration_may_be_text_a_number_or_a_timedelta(interval: str | float | datetime.timedelta) -> None:
    config = ProducerConfig(store="memory://", flush_interval=interval)
    assert (config.flush_interval, config.flush_interval_s) == (0.1, 0.1)
    assert config == ProducerConfig(store="memory://")


def test_the_defaults_are_those_of_the_reference() -> None:
    producer, consumer = ProducerConfig(store="memory://"), ConsumerConfig(store="memory://")
    assert (producer.flush_size, producer.inflight_bytes_max) == (64 << 20, 512 << 20)
    assert (producer.manifest_bytes_max, producer.append_deadline_s) == (256 << 20, 60.0)
    assert producer.compression is CompressionType.NONE
    assert (consumer.gc_interval_s, consumer.gc_grace_period_s) == (300.0, 600.0)
    assert (consumer.prefetch_bytes, consumer.batch_bytes_max) == (256 << 20, 1 << 30)
    assert consumer.retry_deadline_s == 30.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"flush_interval": "5"}, "flush_interval: '5' is not a duration"),
        ({"flush_size_bytes": 0}, "flush_size_bytes must be a whole number of at least 1"),
        ({"flush_size_bytes": "2GiB"}, "flush_size_bytes must be at most"),
        ({"max_parallel_uploads": True}, "max_parallel_uploads must be a whole number of at least 1"),
        ({"merge_metadata": "yes"}, "merge_metadata must be True or False"),
        ({"batch_compression": "gzip"}, "batch_compression is 'none' or 'zstd'"),
        ({"data_path_prefix": "../up"}, "data_path_prefix: "),
    ],
)
def test_a_wrong_value_is_refused_by_the_constructor(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProducerConfig(store="memory://", **wrong)  # type: ignore[arg-type]


def test_a_whole_number_in_a_file_is_milliseconds() -> None:
    mapping = {"object_store": {"type": "InMemory"}, "gc_interval": 300_000, "retry_deadline": 5}
    config = config_from_mapping(ConsumerConfig, mapping, where="queue.yaml")
    assert (config.store, config.gc_interval_s, config.retry_deadline_s) == ("memory://", 300.0, 5.0)


def test_a_wrong_key_of_a_nested_store_is_reported_with_its_place() -> None:
    mapping = {"store": {"url": "memory://", "retrys": 1}}
    with pytest.raises(ConfigError, match=r"queue\.yaml: store\.retrys: unknown key, did you mean 'retries'"):
        config_from_mapping(ProducerConfig, mapping, where="queue.yaml")
