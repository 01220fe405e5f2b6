"""Penstock on a standalone cluster: executors are separate processes, and tasks run more than once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pyarrow.dataset
import pytest
from deltalake import DeltaTable
from tests.spark.cluster import Cluster, queued, standalone_cluster

import penstock
from penstock.buffer import Producer, ProducerConfig
from penstock.config import Setting

DRIVER = Path(__file__).with_name("cluster_driver.py")
SOURCE = str(Path(penstock.__file__).parents[1])
BATCHES, EACH = 8, 25

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def produce(store: Path) -> Counter[int]:
    async def work() -> None:
        async with Producer(ProducerConfig(store=str(store), flush_interval="1h")) as producer:
            for batch in range(BATCHES):
                numbers = range(batch * EACH, (batch + 1) * EACH)
                await producer.produce([b'{"n":%d}' % n for n in numbers])
                await producer.flush()

    asyncio.run(work())
    return Counter(range(BATCHES * EACH))


def drive(
    cluster: Cluster,
    root: Path,
    work: list[str],
    *,
    conf: Mapping[str, str] | None = None,
    pipeline: Mapping[str, Setting] | None = None,
    python: str = sys.executable,
) -> dict[str, object]:
    """Run the driver and return its results."""
    settings = {
        "master": cluster.master,
        "conf": cluster.conf | dict(conf or {}),
        "root": str(root),
        "work": work,
        "pipeline": pipeline,
    }
    file = root / "settings.json"
    file.write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(file)],
        check=False,
        env=os.environ | {"PYTHONPATH": SOURCE, "PYSPARK_PYTHON": python},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return cast("dict[str, object]", json.loads(done.stdout.splitlines()[-1]))


def test_a_cluster_reads_streams_and_delivers_once_though_tasks_run_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    numbers = produce(tmp_path / "store")
    pipeline: dict[str, Setting] = {
        "name": "spread",
        "source": {"buffer": {"store": "store", "partitions": 4}},
        "decode": {"format": "json", "schema": "n bigint"},
        "sinks": {
            "delta": {"transform": "SELECT race('delta', n) AS n FROM input", "delta": {"path": "delta"}},
            "parquet": {
                "transform": "SELECT race('parquet', n) AS n FROM input",
                "parquet": {"path": "parquet"},
            },
            "buffer": {
                "transform": "SELECT cast(race('buffer', n) AS string) AS value FROM input",
                "buffer": {"store": "copies"},
            },
        },
    }
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "100ms",
    }
    found = drive(cluster, tmp_path, ["read", "stream", "pipeline"], conf=speculation, pipeline=pipeline)
    assert found == {"read": numbers.total(), "stream": True, "pipeline": True}
    streamed = DeltaTable(str(tmp_path / "streamed")).to_pyarrow_table()
    positions = set(zip(streamed["sequence"].to_pylist(), streamed["index"].to_pylist(), strict=True))
    assert streamed.num_rows == len(positions) == numbers.total()
    for sink in ("delta", "parquet", "buffer"):
        assert (tmp_path / f"{sink}.second").exists(), f"no task of {sink} ran twice"
    assert Counter(DeltaTable(str(tmp_path / "delta")).to_pyarrow_table()["n"].to_pylist()) == numbers
    folder = pyarrow.dataset.dataset(tmp_path / "parquet").to_table(columns=["n"])
    assert Counter(folder["n"].to_pylist()) == numbers
    assert Counter(map(int, queued(tmp_path / "copies"))) == numbers


_WITHOUT_PENSTOCK = """\
import os
import sys

if "WITHOUT_PENSTOCK" in os.environ:

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "penstock":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent())
"""


def test_executors_without_the_package_are_reported(cluster: Cluster, tmp_path: Path) -> None:
    produce(tmp_path / "store")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_WITHOUT_PENSTOCK)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    conf = {"spark.executorEnv.WITHOUT_PENSTOCK": "1", "spark.task.maxFailures": "1"}
    found = drive(cluster, tmp_path, ["read"], conf=conf, python=str(python))
    kind, sentence = cast("list[str]", found["error"])
    assert kind == "Unsupported"
    assert sentence.startswith(
        f"executors cannot import penstock: install the same version, {penstock.__version__}"
    )
