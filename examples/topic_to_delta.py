"""Move clicks from a durable topic into a Delta table: each exactly once, although Spark is killed.

    python examples/topic_to_delta.py [DIRECTORY]

1. Starts a topics server on a free port, with its data in DIRECTORY, and creates the topic `clicks` (fsync).
2. Writes clicks to it, and starts a Spark query that streams them into the Delta table DIRECTORY/table.
3. Kills that query, with its Java, as soon as the table has rows, and continues writing.
4. Starts the query again with the same checkpoint, and compares the table with what was acknowledged.

The query is the function `stream`; everything else is there to disturb it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
from deltalake import DeltaTable

from penstock.topics.client.sync import Client
from penstock.topics.config import Durability, TopicConfig

CLICKS_PER_WRITE = 500


def stream(url: str, root: Path, *, until_empty: bool) -> None:
    """Run the query: from the topic, through SQL, into the table. It may be killed and run again."""
    from penstock.spark import build_session

    spark = build_session("clicks", master="local[2]")
    clicks = spark.readStream.format("penstock-topic").option("url", url).load("clicks")
    rows = clicks.selectExpr(
        "seq", "ts", "get_json_object(data, '$.user') AS user", "get_json_object(data, '$.url') AS url"
    )
    writer = (
        rows.writeStream.format("penstock-delta")
        .option("checkpointLocation", str(root / "checkpoint"))
        .trigger(**({"availableNow": True} if until_empty else {"processingTime": "200 milliseconds"}))
    )
    writer.start(str(root / "table")).awaitTermination()
    spark.stop()


def main(root: Path) -> None:
    with serving(root) as url, Client(url) as client:
        client.put_topic("clicks", TopicConfig(durability=Durability.FSYNC))
        acknowledged = write(client, 0, 2_000)
        query = start_query(url, root, until_empty=False)
        wait_for_rows(root)
        acknowledged = write(client, acknowledged, 2_000)
        os.killpg(query.pid, signal.SIGKILL)
        query.wait()
        acknowledged = write(client, acknowledged, 2_000)
        assert start_query(url, root, until_empty=True).wait() == 0
    files = DeltaTable(str(root / "table")).file_uris()
    seqs = [seq for file in files for seq in pq.read_table(file, columns=["seq"])["seq"].to_pylist()]
    summary = f"acknowledged {acknowledged}, in the table {len(seqs)}, distinct {len(set(seqs))}\n"
    sys.stdout.write(summary)
    assert sorted(seqs) == [*range(1, acknowledged + 1)]


def write(client: Client, first: int, count: int) -> int:
    """Write clicks; each call returns when they are on disk. Return the total so far."""
    for start in range(first, first + count, CLICKS_PER_WRITE):
        numbers = range(start, start + CLICKS_PER_WRITE)
        client.write("clicks", [{"user": f"u{n % 97}", "url": f"/page/{n}"} for n in numbers])
    return first + count


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Run a topics server while the context is open, and yield its address."""
    port_file = root / "port"
    settings = {
        "TOPICS_PORT": "0",
        "TOPICS_PORT_FILE": str(port_file),
        "TOPICS_DATA_DIR": str(root / "topics"),
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "topics", "serve"], env=os.environ | settings
    )
    try:
        while not port_file.exists():
            assert server.poll() is None, "the server ended during its start"
            time.sleep(0.05)
        yield f"http://{port_file.read_text().strip()}"
    finally:
        server.terminate()
        server.wait()


def start_query(url: str, root: Path, *, until_empty: bool) -> subprocess.Popen[bytes]:
    """Start the query as a separate process, with its Java in the same group, so that both can be killed."""
    mode = "--drain" if until_empty else "--follow"
    return subprocess.Popen([sys.executable, __file__, mode, url, str(root)], start_new_session=True)


def wait_for_rows(root: Path) -> None:
    while not DeltaTable.is_deltatable(str(root / "table")):
        time.sleep(0.2)


if __name__ == "__main__":
    if sys.argv[1:2] in (["--follow"], ["--drain"]):
        stream(sys.argv[2], Path(sys.argv[3]), until_empty=sys.argv[1] == "--drain")
    elif len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True)
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
