"""The example of a declarative pipeline, run twice.

Without an address, Spark's command starts a server on a fixed port. The tests therefore set one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.dataset
import pyspark
import pytest
from tests.spark.cluster import connect_server

import penstock
from penstock.buffer import Producer, ProducerConfig
from penstock.spark.session.java import ensure_java

EXAMPLE = Path(__file__).parents[2] / "examples" / "declarative_pipeline"
PLACE = "/tmp/penstock-declarative"

pytestmark = pytest.mark.long


def produce(store: Path, users: list[str]) -> None:
    async def work() -> None:
        async with Producer(ProducerConfig(store=str(store))) as producer:
            await producer.produce([b'{"user":"%s","url":"/"}' % user.encode() for user in users])

    asyncio.run(work())


def run(folder: Path) -> None:
    home = Path(pyspark.__file__).parent
    environment = os.environ | {
        "JAVA_HOME": str(ensure_java().home),
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(penstock.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with connect_server(folder, {"spark.sql.catalogImplementation": "hive"}) as address:
        done = subprocess.run(
            [str(home / "bin" / "spark-pipelines"), "run", "--remote", address],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    told = done.stdout + done.stderr
    assert "Run is COMPLETED." in told, told[-5000:]
    # Spark's command cannot handle a response of its own server about a source that a file registered.
    assert done.returncode == 0 or "__python_accumulator__" in told, told[-5000:]


def table(folder: Path, name: str) -> list[dict[str, object]]:
    found = pyarrow.dataset.dataset(folder / "spark-warehouse" / name).to_table()
    rows: list[dict[str, object]] = found.to_pylist()
    return rows


@pytest.mark.timeout(600)
def test_the_declarative_example_takes_each_record_once_over_two_runs(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    settings = folder / "spark-pipeline.yml"
    assert PLACE in settings.read_text()
    settings.write_text(settings.read_text().replace(PLACE, str(tmp_path / "place")))
    produced: list[str] = []
    for users in (["ada", "eve", "ada"], ["eve"]):
        produce(tmp_path / "place" / "queue", users)
        produced += users
        run(folder)
        clicks = table(folder, "clicks")
        assert Counter(row["user"] for row in clicks) == Counter(produced)
        assert len({(row["sequence"], row["index"]) for row in clicks}) == len(produced)
        counted = {row["user"]: row["clicks"] for row in table(folder, "clicks_per_user")}
        assert counted == Counter(produced)
