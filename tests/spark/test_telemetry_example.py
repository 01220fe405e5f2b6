"""The worked example from services through the collector into tables runs unchanged, including the kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

import penstock

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(600)  # a collector twice, and three pipelines on one Spark
def test_the_example_brings_all_telemetry_into_the_tables_once(tmp_path: Path) -> None:
    source = str(Path(penstock.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "examples/telemetry/telemetry.py", str(tmp_path / "work")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = "{'traces': 2000, 'metrics': 2000, 'logs': 2000}"
    assert f"acknowledged {counts}, in the tables {counts}" in done.stdout
    lake = tmp_path / "work" / "lake"
    spans = DeltaTable(str(lake / "spans")).to_pyarrow_table()
    assert len(pc.unique(spans["span_id"])) == 2000
    durations: dict[tuple[object, object], list[float]] = defaultdict(list)
    for row in spans.select(["service_name", "start_time", "duration_ns"]).to_pylist():
        minute = row["start_time"].replace(second=0, microsecond=0)
        durations[row["service_name"], minute].append(row["duration_ns"] / 1e6)
    latency = DeltaTable(str(lake / "latency")).to_pyarrow_table().to_pylist()
    assert len(latency) == len(durations) >= 50
    for row in latency:
        exact = sorted(durations[row["service_name"], row["minute"]])
        assert row["spans"] == len(exact)
        for share, told in ((0.5, row["p50_ms"]), (0.99, row["p99_ms"])):
            right = next(value for place, value in enumerate(exact, 1) if place >= share * len(exact))
            assert told == pytest.approx(right, rel=0.05)
