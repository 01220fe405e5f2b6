"""Count clicks per minute and page with Spark, and query them in PromQL. Each click counts once.

    python examples/clicks_per_minute/clicks_per_minute.py [DIRECTORY]

1. Starts `penstock timeseries serve`, fed from the queue DIRECTORY/points.
2. Produces clicks into the queue DIRECTORY/clicks, and starts a Spark query that counts them per minute and
   page, and writes each finished minute to the format `penstock-timeseries`.
3. Kills that query, with its Java, as soon as it has written some minutes, and continues producing.
4. Kills the database as well, and starts both again.
5. Compares the sum in PromQL with what was produced.

The query is the function `count_per_minute`; everything else is there to disturb it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock.buffer import Producer, ProducerConfig

START = datetime(2026, 11, 16, 10, 0, tzinfo=UTC)
PAGES = ("/", "/cart", "/search", "/help")
CLICKS_PER_MINUTE = 300
JITTER_S = 20


def count_per_minute(root: Path, *, until_empty: bool) -> None:
    """Run the query: a window per minute, from queue to queue. It may be killed and run again."""
    from pyspark.sql import functions as F

    from penstock.spark import build_session

    spark = build_session("clicks", master="local[2]", conf={"spark.sql.shuffle.partitions": "2"})
    records = spark.readStream.format("penstock-buffer").load(str(root / "clicks"))
    clicks = records.select(
        F.from_json(F.col("value").cast("string"), "page string, at timestamp").alias("c")
    )
    per_minute = (
        clicks.select("c.*")
        .withWatermark("at", "30 seconds")
        .groupBy(F.window("at", "1 minute"), "page")
        .agg(F.count("*").alias("value"))
        .select("page", "value", F.col("window.end").alias("timestamp"))
    )
    trigger = {"availableNow": True} if until_empty else {"processingTime": "500 milliseconds"}
    query = (
        per_minute.writeStream.format("penstock-timeseries")
        .outputMode("append")  # a minute is written once, when no more of its clicks are expected
        .option("metric", "clicks_per_minute")
        .option("checkpointLocation", str(root / "checkpoint"))
        .trigger(**trigger)
        .start(str(root / "points"))
    )
    query.awaitTermination()
    spark.stop()


def main(root: Path) -> None:
    clicks: Counter[str] = Counter()
    with serving(root):
        produce(root, clicks, minutes=range(4))
        query = start_query(root, until_empty=False)
        wait_for_points(root)
        produce(root, clicks, minutes=range(4, 8))
        os.killpg(query.pid, signal.SIGKILL)
        query.wait()
    with serving(root) as url:  # killed at the end of the block above
        produce(root, clicks, minutes=range(8, 12))
        close_the_last_minutes(root)
        assert start_query(root, until_empty=True).wait() == 0
        found = wait_for_total(url, clicks.total())
        per_page = {
            page: query_value(url, f'sum(sum_over_time(clicks_per_minute{{page="{page}"}}[2h]))')
            for page in PAGES
        }
    report(f"produced {clicks.total()}, in the time series {found}, by page {per_page}")
    assert (found, per_page) == (clicks.total(), dict(clicks))


def produce(root: Path, clicks: Counter[str], minutes: range) -> None:
    """Produce the clicks of some minutes, slightly out of order. Return when all are in the queue."""
    rng = random.Random(minutes.start)
    records = []
    for minute in minutes:
        for number in range(CLICKS_PER_MINUTE):
            at = START + timedelta(minutes=minute, seconds=60 * number / CLICKS_PER_MINUTE)
            page = rng.choices(PAGES, weights=(8, 4, 2, 1))[0]
            records.append(click(page, at - timedelta(seconds=rng.uniform(0, JITTER_S))))
            clicks[page] += 1
    asyncio.run(send(root, records))


def close_the_last_minutes(root: Path) -> None:
    """Advance time: without a later record, Spark would keep waiting for clicks of the last minute."""
    asyncio.run(send(root, [click(None, START + timedelta(hours=1))]))


def click(page: str | None, at: datetime) -> bytes:
    return json.dumps({"page": page, "at": at.isoformat()}).encode()


async def send(root: Path, records: list[bytes]) -> None:
    async with Producer(ProducerConfig(store=str(root / "clicks"))) as producer:
        for start in range(0, len(records), 100):
            await producer.produce(records[start : start + 100])
            await producer.flush()


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Run the database, yield its address, and kill it at the end of the block."""
    port_file = root / "port"
    port_file.unlink(missing_ok=True)
    command = ["timeseries", "serve", str(root / "database"), "--port", "0", "--port-file", str(port_file)]
    command += ["--buffer", str(root / "points"), "--poll-interval", "100ms"]
    with subprocess.Popen([sys.executable, "-m", "penstock.cli", *command]) as server:
        try:
            while not port_file.exists():
                assert server.poll() is None, "the database ended during its start"
                time.sleep(0.05)
            yield f"http://{port_file.read_text().strip()}"
        finally:
            server.kill()


def start_query(root: Path, *, until_empty: bool) -> subprocess.Popen[bytes]:
    """Start the query as a separate process, with its Java in the same group, so that both can be killed."""
    mode = "--drain" if until_empty else "--follow"
    return subprocess.Popen([sys.executable, __file__, mode, str(root)], start_new_session=True)


def wait_for_points(root: Path) -> None:
    while not any((root / "points" / "ingest").glob("*.batch")):
        time.sleep(0.1)


def wait_for_total(url: str, total: int) -> float:
    """Return the sum of all minutes when it reaches `total`, or what it is after 30 seconds."""
    found, deadline = 0.0, time.monotonic() + 30
    while found < total and time.monotonic() < deadline:
        time.sleep(0.1)
        found = query_value(url, "sum(sum_over_time(clicks_per_minute[2h]))")
    return found


def query_value(url: str, query: str) -> float:
    """Return the value of a PromQL query, an hour after the start."""
    at = (START + timedelta(hours=1)).timestamp()
    parameters = urllib.parse.urlencode({"query": query, "time": at})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{parameters}", timeout=30) as response:  # noqa: S310
            result = json.load(response)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code != 503:  # it listens, but is still opening its database
            raise
        return 0.0
    return float(result[0]["value"][1]) if result else 0.0


def report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] in (["--follow"], ["--drain"]):
        count_per_minute(Path(sys.argv[2]), until_empty=sys.argv[1] == "--drain")
    elif len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True)
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
