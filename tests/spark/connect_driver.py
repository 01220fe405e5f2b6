"""A client of a Spark Connect server.

    connect_driver.py sc://HOST:PORT FOLDER RESULT.json

Reads the queue in FOLDER/store, streams it into a table, and runs a pipeline twice. The second run repeats
the last micro-batch. RESULT.json has the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from table_stream import stream_into_table

from penstock.config import Setting
from penstock.spark import build_session
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.pipeline.spec import read_spec

PIPELINE: dict[str, Setting] = {
    "name": "connected",
    "source": {"buffer": {"store": "store"}},
    "decode": {"format": "json", "schema": "n bigint"},
    "sinks": {
        "delta": {"delta": {"path": "delta"}},
        "parquet": {"parquet": {"path": "parquet"}},
        "buffer": {"transform": "SELECT _value AS value FROM input", "buffer": {"store": "copies"}},
        "totals": {
            "transform": "SELECT n % 2 AS odd, count(*) AS records FROM input GROUP BY 1",
            "delta": {"path": "totals", "merge": {"keys": ["odd"], "add": ["records"]}},
        },
    },
    "trigger": {"max_batches": 2},
}


def run_pipeline(spark: SparkSession, pipeline: Pipeline) -> dict[str, object]:
    lines: list[BatchLine] = []
    run = pipeline.start(spark, once=True, on_line=lines.append)
    assert run.wait(300)
    status = run.status()
    return {
        "batches": [line.batch for line in lines],
        "read": status.read,
        "dead": status.dead,
        "rows": dict(status.rows or {}),
    }


def main() -> None:
    root, result = Path(sys.argv[2]), Path(sys.argv[3])
    spark = build_session("connect", remote=sys.argv[1])
    seen: dict[str, object] = {"class": type(spark).__module__}
    seen["counted"] = spark.read.format("penstock-buffer").option("store", str(root / "store")).load().count()
    assert stream_into_table(spark, root)
    pipeline = Pipeline(read_spec(PIPELINE, base=root))
    seen["first"] = run_pipeline(spark, pipeline)
    for commit in Path(pipeline.spec.checkpoint_path, "commits").glob("*1*"):
        commit.unlink()
    seen["again"] = run_pipeline(spark, pipeline)
    result.write_text(json.dumps(seen))
    spark.stop()


if __name__ == "__main__":
    main()
