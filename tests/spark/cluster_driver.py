"""A driver of the standalone cluster, in a separate process.

cluster_driver.py SETTINGS.json

SETTINGS.json: `master`, `conf`, `root`, and `work`: `read` counts the queue's records, `stream` copies them
into `root`/streamed with a stream, `pipeline` runs the pipeline in `pipeline`. It prints its results as
JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession
from table_stream import stream_into_table

from penstock.spark import build_session
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.spec import read_spec
from penstock.spark.session.failures import explain


def register_race(spark: SparkSession, root: str) -> None:
    """`race(sink, n)` is n. The first attempt at n = 0 in a sink waits for the second to arrive there."""

    def race(sink: str, n: int) -> int:
        if n == 0:
            first, second = f"{root}/{sink}.first", f"{root}/{sink}.second"
            try:
                os.close(os.open(first, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                Path(second).touch()
            deadline = time.monotonic() + 120
            while not os.path.exists(second):
                assert time.monotonic() < deadline, f"nobody else ever worked at {sink}"
                time.sleep(0.02)
        return n

    spark.udf.register("race", race, "bigint")


def read(spark: SparkSession, root: Path) -> object:
    frame = spark.read.format("penstock-buffer").option("store", str(root / "store")).load()
    return frame.count()


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    root = Path(settings["root"])
    spark = build_session("cluster", master=settings["master"], conf=settings["conf"])
    found: dict[str, object] = {}
    try:
        if "read" in settings["work"]:
            found["read"] = read(spark, root)
        if "stream" in settings["work"]:
            found["stream"] = stream_into_table(spark, root)
        if "pipeline" in settings["work"]:
            register_race(spark, str(root))
            pipeline = Pipeline(read_spec(settings["pipeline"], base=root))
            found["pipeline"] = pipeline.start(spark, once=True).wait(300)
    except Exception as error:
        known = explain(error)
        if known is None:
            raise
        found["error"] = [type(known).__name__, str(known)]
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
