from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.topics.config import EngineConfig


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("wal_shards", 0, "1 to 64"),
        ("wal_shards", 65, "1 to 64"),
        ("wal_file_bytes", 255, "at least 256"),
        ("wal_queue_max", 0, "at least 1"),
        ("sync_interval_ms", 0, "at least 1"),
        ("segment_max_events", 0, "at least 1"),
        ("segment_max_bytes", 0, "at least 1"),
        ("segment_max_age_ms", -1, "at least 0"),
        ("hot_retain_segments", -1, "at least 0"),
        ("hot_retain_bytes", -1, "at least 0"),
        ("checkpoint_bytes", 0, "at least 1"),
        ("checkpoint_interval_ms", 0, "at least 1"),
        ("max_topics", -1, "at least 0"),
        ("max_total_bytes", -1, "at least 0"),
        ("segment_max_events", "10", "a whole number"),
        ("segment_max_events", True, "a whole number"),
        ("segment_max_events", 1.5, "a whole number"),
        ("data_dir", "", "a directory"),
        ("cold_dir", "", "a directory or a store URL"),
    ],
)
def test_an_invalid_value_is_refused_with_the_expected_one(name: str, wrong: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: expected .*{expected}"):
        EngineConfig(**{"data_dir": "/data", name: wrong})  # type: ignore[arg-type]


def test_the_lowest_values_are_accepted() -> None:
    EngineConfig(
        data_dir="/data",
        wal_shards=64,
        segment_max_events=1,
        segment_max_bytes=1,
        segment_max_age_ms=0,
        hot_retain_segments=0,
        max_topics=0,
    )


def test_old_segments_cannot_be_moved_to_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for cold in (tmp_path, f"{tmp_path}/x/..", f"file://{tmp_path}", tmp_path / "link"):
        with pytest.raises(ConfigError, match="cold_dir: expected a directory other than data_dir"):
            EngineConfig(data_dir=str(tmp_path), cold_dir=str(cold))
    EngineConfig(data_dir=str(tmp_path), cold_dir=str(tmp_path / "cold"))
