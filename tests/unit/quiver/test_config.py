from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.quiver import QuiverConfig
from penstock.quiver.config import SegmentConfig


def test_the_defaults_are_those_of_the_reference() -> None:
    config = QuiverConfig()
    assert config.segment.target_bytes == 32_000_000
    assert config.segment.max_open_s == 5.0
    assert (config.wal.max_bytes, config.wal.rotation_bytes) == (128_000_000, 64_000_000)
    assert (config.wal.flush, config.wal.flush_interval_s, config.wal.syncs) == ("group", 0.025, True)
    assert config.retention.cap_bytes == 10 * 1024**3
    assert config.retention.max_age_s is None
    assert config.maintenance_interval_s == 0.1


def test_the_settings_of_a_collector_are_accepted_unchanged() -> None:
    config = QuiverConfig.from_mapping(
        {
            "path": "./quiver_data",
            "segment": {"target_size": "32MB"},
            "wal": {"max_size": "4GB", "flush_interval": "25ms"},
            "retention": {
                "max_retain_after_ingestion_hours": 72,
                "size_cap": "500GB",
                "size_cap_policy": "drop_oldest",
            },
        }
    )
    assert config.retention.max_age_s == 72 * 3600
    assert config.cap_per_core(4) == 125_000_000_000


def test_sizes_and_durations_become_numbers_in_every_notation() -> None:
    read = QuiverConfig.from_mapping({"segment": {"target_size": "1MB", "max_open_duration": "250ms"}})
    made = QuiverConfig(segment=SegmentConfig(target_size=1_000_000, max_open_duration=0.25))
    assert read == made
    assert (read.segment.target_size, read.segment.max_open_duration) == (1_000_000, 0.25)
    assert read.with_path("x").segment is read.segment


def test_keys_may_be_dotted_nested_or_both() -> None:
    config = QuiverConfig.from_mapping(
        {"retention.size_cap_policy": "drop_oldest", "retention": {"size_cap": "1GB"}, "wal.flush": "none"}
    )
    assert (config.retention.size_cap_policy, config.retention.cap_bytes) == ("drop_oldest", 10**9)
    assert config.wal.flush == "none"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"segmnt": {}}, r"segmnt: unknown key, did you mean 'segment'"),
        ({"wal": {"max_sise": 1}}, r"wal\.max_sise: unknown key, did you mean 'max_size'"),
        ({"wal.flush": "grup"}, r"wal\.flush: expected one of .* did you mean 'group'"),
        ({"wal": {"flush": "none"}, "wal.flush": "none"}, r"wal\.flush: set twice"),
        ({"wal": 5}, r"wal: expected a mapping"),
        ({"segment": {"layout": "otap"}}, r"layout 'otap' is not implemented"),
        ({"segment": {"target_size": "2GiB"}}, "target_size must be at most"),
        ({"segment": {"target_size": 0}}, "target_size must be at least 1"),
        ({"wal": {"max_size": 100}}, "max_size must be at least 4096"),
        ({"delivery": {"max_in_flight": 0}}, "max_in_flight must be at least 1"),
        ({"maintenance_interval": "0s"}, "maintenance_interval must be above 0"),
        ({"path": ""}, "path must name a directory"),
        ({"retry": {"multiplier": 0.5}}, "multiplier must be at least 1"),
    ],
)
def test_a_wrong_setting_is_reported_with_its_location(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuiverConfig.from_mapping(mapping)


def test_two_files_of_the_log_always_fit_into_it() -> None:
    config = QuiverConfig.from_mapping({"wal": {"max_size": "10MB"}})
    assert config.wal.rotation_bytes == 5_000_000


def test_without_a_log_the_cap_need_not_hold_one() -> None:
    mapping = {"retention.size_cap": "100MB"}
    with pytest.raises(ConfigError, match=r"size_cap must be at least 192000000 bytes for 1 core"):
        QuiverConfig.from_mapping(mapping).cap_per_core(1)
    assert QuiverConfig.from_mapping({**mapping, "durability": "segment_only"}).cap_per_core(1) == 100_000_000
