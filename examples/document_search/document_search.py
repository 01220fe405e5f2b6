"""Embed documents in a Spark job, store them in a collection of vectors, and search them over HTTP.

    python examples/document_search/document_search.py [DIRECTORY]

1. Starts `penstock vector serve`, fed from the queue DIRECTORY/vectors.
2. Runs a Spark job that embeds the documents of `documents.jsonl` and writes them to the format
   `penstock-vector`. Then runs it again, as a scheduler would after a crash: nothing is written twice.
3. Searches with other words; the right document comes first.
4. Changes one document and deletes another in a second version of the job, and searches again.

The job is the function `embed_documents`. Its embedding hashes words and parts of words, which needs no model
and no network. Replace `embed` with any other function that returns as many numbers for each text.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DOCUMENTS = Path(__file__).with_name("documents.jsonl")
DIMENSIONS = 256
SEARCHES = {
    "how do I bake a loaf of bread?": "bread",
    "a hole in my bike's tyre": "bicycle",
    "planting tomatoes after frost": "tomatoes",
    "the moon and the sea": "tides",
    "which star is in the north?": "stars",
}


def embed(text: str) -> np.ndarray:
    """Return a direction for a text: its words and their parts, each hashed to one of the dimensions."""
    vector = np.zeros(DIMENSIONS, np.float32)
    for word in re.findall(r"\w+", text.lower()):
        parts = [word, *(f"<{word}>"[at : at + 4] for at in range(len(word) - 1))]
        for part in parts:
            digest = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
            weight = min(len(word), 8) / len(parts)  # short words carry little meaning
            vector[digest % DIMENSIONS] += weight if digest >> 63 else -weight
    return vector


def embed_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Embed whole Arrow batches in a task: titles and texts in, vectors out."""
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("title", "text"))
        vectors = np.array([embed(f"{title} {text}") for title, text in zip(*columns, strict=True)])
        ends = np.arange(batch.num_rows + 1, dtype=np.int32) * DIMENSIONS
        embedded = pa.ListArray.from_arrays(ends, vectors.reshape(-1).astype(np.float32))
        yield pa.RecordBatch.from_arrays(
            [batch.column("id"), embedded, batch.column("title"), batch.column("deleted")],
            ["id", "vector", "title", "deleted"],
        )


def embed_documents(documents: DataFrame, root: Path, version: int) -> None:
    """Run the job. Under the same version it writes nothing twice, whatever killed the first run."""
    columns = "id string, vector array<float>, title string, deleted boolean"
    vectors = documents.mapInArrow(embed_batches, columns)
    (
        vectors.write.format("penstock-vector")
        .option("delete", "deleted")
        .option("dimensions", DIMENSIONS)
        .option("txnAppId", "documents")
        .option("txnVersion", version)
        .mode("append")
        .save(str(root / "vectors"))
    )


def main(root: Path) -> None:
    from penstock.spark import build_session

    spark = build_session("documents", master="local[2]")
    documents = read_documents(spark)
    with serving(root) as url:
        for _ in range(2):
            embed_documents(documents, root, version=0)
        wait_for(url, "piano")
        for words, expected in SEARCHES.items():
            found = search(url, words)
            report(f"{words} -> {', '.join(found)}")
            assert found[0] == expected
        embed_documents(changed_documents(spark), root, version=1)
        wait_for(url, "piano", title="Tuning a piano")
        after = search(url, "tightening the strings"), search(url, "the moon and the sea")
        report(f"after a change and a deletion: {after[0][0]}, {after[1][0]}")
        assert after[0][0] == "piano"
        assert "tides" not in after[1]
        assert len(search(url, "everything", k=100)) == documents.count() - 1
    spark.stop()


def read_documents(spark: SparkSession) -> DataFrame:
    schema = "id string, title string, text string"
    return spark.read.schema(schema).json(str(DOCUMENTS)).selectExpr("*", "false AS deleted")


def changed_documents(spark: SparkSession) -> DataFrame:
    rows = [
        (
            "piano",
            "Tuning a piano",
            "Tighten the strings of the piano with a lever until they sound pure.",
            False,
        ),
        ("tides", None, None, True),
    ]
    return spark.createDataFrame(rows, "id string, title string, text string, deleted boolean")


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Serve the collection while the context is open, and yield its address."""
    port_file = root / "port"
    command = ["vector", "serve", str(root / "database"), "--port", "0", "--port-file", str(port_file)]
    command += ["--dimensions", str(DIMENSIONS), "--metric", "cosine", "--flush-interval", "100ms"]
    command += ["--buffer", str(root / "vectors"), "--poll-interval", "100ms"]
    with subprocess.Popen([sys.executable, "-m", "penstock.cli", *command]) as server:
        try:
            while not port_file.exists():
                assert server.poll() is None, "the server ended during its start"
                time.sleep(0.05)
            yield f"http://{port_file.read_text().strip()}/api/v1/vector"
        finally:
            server.terminate()


def search(url: str, words: str, k: int = 3) -> list[str]:
    """Return the ids of the nearest documents, best first."""
    body = {"vector": embed(words).tolist(), "k": k, "includeFields": ["title"]}
    response = request_json(f"{url}/search", body)
    assert response is not None
    return [hit["vector"]["id"] for hit in response["results"]]


def wait_for(url: str, name: str, title: str | None = None) -> None:
    """Wait until the collection has a document, with this title if one is given."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = request_json(f"{url}/vectors/{name}")
        if found is not None and title in (None, found["vector"]["attributes"]["title"]):
            return
        time.sleep(0.1)
    raise AssertionError(f"{name} did not arrive")


def request_json(url: str, body: object = None) -> dict | None:
    """Return the response, or None if the document does not exist (yet)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code not in (404, 503):
            raise
        return None


def report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True)
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
