"""A job queue: workers claim jobs, one worker is killed, one job always fails, and nothing is lost.

    python examples/job_queue.py [DIRECTORY]

1. Starts a topics server on a free port, with its data in DIRECTORY, and creates the queue `thumbnails`.
2. Puts 60 jobs into it. One of them always fails.
3. Starts three workers, and kills one with SIGKILL while it holds a job: that job goes to another one.
4. Waits until the queue is empty, and checks: every job is done, the one that fails is in `thumbnails.dead`.

A worker is the function `work`. A job may be done twice: by a worker that was killed before its ack, and by
the next one. A job must tolerate that: here it writes a file with its own name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.topics import ClaimedJob, TopicConfig
from penstock.topics.client.sync import Client

JOBS = 60
BROKEN = "image-13.broken"
QUEUE, DEAD = "thumbnails", "thumbnails.dead"


def work(url: str, node: str, results: Path) -> None:
    """Do jobs as they arrive. If this process dies, its jobs are immediately back in the queue."""
    with Client(url) as client:
        for job in client.work(QUEUE, node, max=1, lease_ms=5_000):
            try:
                make_thumbnail(job, results)
            except ValueError as error:
                sys.stderr.write(f"{node}: delivery {job.deliveries} of job {job.seq} failed: {error}\n")
                client.nack(QUEUE, node, [job], delay_ms=50)
            else:
                # With the lease id of this delivery: a worker that was too slow acks nothing.
                client.ack(QUEUE, node, [job])


def make_thumbnail(job: ClaimedJob, results: Path) -> None:
    image = json.loads(bytes(job.data))["image"]
    if image == BROKEN:
        raise ValueError(f"{image} is not an image")
    time.sleep(0.02)
    staged = results / f".{image}.{os.getpid()}"
    staged.write_text(f"a thumbnail of {image}", encoding="utf-8")
    staged.replace(results / image)


def main(root: Path) -> None:
    results = root / "results"
    results.mkdir()
    with serving(root) as url, Client(url) as client:
        config = TopicConfig(
            type="queue", durable=True, leases_durable=True, max_deliveries=3, dead_letter=DEAD
        )
        client.put_topic(QUEUE, config)
        images = [BROKEN if n == 13 else f"image-{n}.png" for n in range(JOBS)]
        client.write(QUEUE, [{"image": image} for image in images], idempotency_key="upload-1")
        workers = [start_worker(url, f"worker-{n}", results) for n in range(3)]
        try:
            while not any(results.glob("image-*")):
                time.sleep(0.02)
            workers[0].kill()
            wait_until_empty(client)
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
                worker.wait()
        dead = [json.loads(bytes(record.data))["image"] for record in client.diff(DEAD).records()]
    done = sorted(path.name for path in results.glob("image-*"))
    sys.stdout.write(f"jobs {JOBS}, done {len(done)}, dead letters {dead}\n")
    assert done == sorted(image for image in images if image != BROKEN)
    assert dead == [BROKEN]


def wait_until_empty(client: Client) -> None:
    while client.state(QUEUE).count:
        time.sleep(0.05)


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Run a topics server while the context is open, and yield its address."""
    port_file = root / "port"
    settings = {
        "TOPICS_PORT": "0",
        "TOPICS_PORT_FILE": str(port_file),
        "TOPICS_DATA_DIR": str(root / "topics"),
    }
    command = [sys.executable, "-m", "penstock.cli", "topics", "serve"]
    server = subprocess.Popen(command, env=os.environ | settings)
    try:
        while not port_file.exists():
            assert server.poll() is None, "the server ended during its start"
            time.sleep(0.05)
        yield f"http://{port_file.read_text().strip()}"
    finally:
        server.terminate()
        server.wait()


def start_worker(url: str, node: str, results: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--work", url, node, str(results)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    elif len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True)
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
