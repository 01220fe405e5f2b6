from __future__ import annotations

import pytest

from penstock.coordinator import CoordinatorConfig, SizeUnit, SyncMode
from penstock.errors import ConfigError


def test_the_defaults_are_those_of_the_design() -> None:
    config = CoordinatorConfig()
    assert (config.queue_capacity, config.flush_interval_s, config.flush_threshold) == (
        10_000,
        10,
        64 * 2**20,
    )
    assert config.pending_max == 2 * config.flush_threshold
    assert (config.max_frozen_deltas, config.subscription_capacity) == (2, 16)
    assert config.sync_mode is SyncMode.EXPLICIT
    assert config.sync_interval_s == config.flush_interval_s


def test_sizes_can_count_items() -> None:
    config = CoordinatorConfig(flush_size_threshold=10_000, size_unit=SizeUnit.ITEMS)
    assert (config.flush_threshold, config.pending_max) == (10_000, 20_000)
    with pytest.raises(ConfigError, match="flush_size_threshold counts items here"):
        CoordinatorConfig(flush_size_threshold="64MiB", size_unit=SizeUnit.ITEMS)
    with pytest.raises(ConfigError, match="max_pending_size counts items here"):
        CoordinatorConfig.from_mapping(
            {"flush_size_threshold": 10, "max_pending_size": "1GiB", "size_unit": "items"}
        )


def test_a_mapping_is_checked_key_by_key() -> None:
    config = CoordinatorConfig.from_mapping({"sync_mode": "every_flush", "max_pending_size": "1GiB"})
    assert config.sync_mode is SyncMode.EVERY_FLUSH
    assert config.pending_max == 2**30
    with pytest.raises(ConfigError, match="did you mean 'flush_interval'"):
        CoordinatorConfig.from_mapping({"flush_intervall": "1s"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"queue_capacity": 0}, "queue_capacity must be a whole number of at least 1"),
        ({"max_frozen_deltas": -1}, "at least 0"),
        ({"sync_interval": 0}, "sync_interval must be above 0"),
        ({"flush_interval": 0, "sync_mode": "interval"}, "sync_interval must be above 0"),
        ({"flush_size_threshold": 0}, "above 0"),
        ({"flush_size_threshold": 10, "max_pending_size": 9}, "writes would wait indefinitely"),
        ({"sync_mode": "sometimes"}, "sync_mode is one of 'explicit', 'every_flush', 'interval'"),
        ({"batch_time_max": "soon"}, "not a duration"),
    ],
)
def test_a_wrong_value_says_what_is_right(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CoordinatorConfig(**wrong)  # type: ignore[arg-type]
