"""Spark Connect: the same formats and pipelines, with the micro-batches in a process of the server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.dataset
import pytest
from deltalake import DeltaTable
from tests.spark.cluster import connect_server, queued

import penstock
from penstock.buffer import Producer, ProducerConfig

DRIVER = Path(__file__).with_name("connect_driver.py")
BATCHES, EACH = 3, 20

pytestmark = pytest.mark.long


def produce(store: Path) -> None:
    async def work() -> None:
        async with Producer(ProducerConfig(store=str(store), flush_interval="1h")) as producer:
            for batch in range(BATCHES):
                numbers = range(batch * EACH, (batch + 1) * EACH)
                await producer.produce([*(b'{"n":%d}' % n for n in numbers), b"bad"])
                await producer.flush()

    asyncio.run(work())


@pytest.mark.timeout(600)
def test_a_client_of_spark_connect_reads_streams_and_runs_pipelines_exactly_once(tmp_path: Path) -> None:
    produce(tmp_path / "store")
    result = tmp_path / "result.json"
    source = str(Path(penstock.__file__).parents[1])
    with connect_server(tmp_path) as address:
        done = subprocess.run(
            [sys.executable, str(DRIVER), address, str(tmp_path), str(result)],
            check=False,
            env=os.environ | {"PYTHONPATH": source},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(result.read_text())
    assert seen["class"].startswith("pyspark.sql.connect")
    records = BATCHES * (EACH + 1)
    assert seen["counted"] == records
    assert DeltaTable(str(tmp_path / "streamed")).to_pyarrow_table().num_rows == records

    numbers = Counter(range(BATCHES * EACH))
    good = BATCHES * EACH
    assert seen["first"]["batches"] == [0, 1]
    assert (seen["first"]["read"], seen["first"]["dead"]) == (records, BATCHES)
    assert seen["first"]["rows"] == {"delta": good, "parquet": good, "buffer": good, "totals": 4}
    # The repeated micro-batch has its line already: nothing is new.
    assert seen["again"] == {"batches": [], "read": 0, "dead": 0, "rows": {}}
    assert Counter(DeltaTable(str(tmp_path / "delta")).to_pyarrow_table()["n"].to_pylist()) == numbers
    folder = pyarrow.dataset.dataset(tmp_path / "parquet").to_table(columns=["n"])
    assert Counter(folder["n"].to_pylist()) == numbers
    assert Counter(json.loads(record)["n"] for record in queued(tmp_path / "copies")) == numbers
    totals = DeltaTable(str(tmp_path / "totals")).to_pyarrow_table().to_pylist()
    assert sorted((row["odd"], row["records"]) for row in totals) == [(0, good // 2), (1, good // 2)]
    assert DeltaTable(str(tmp_path / "delta_dead_letters")).to_pyarrow_table().num_rows == BATCHES
