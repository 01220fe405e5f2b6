"""Spark servers from the pip package: a standalone cluster with two workers, and a Spark Connect server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyspark
from tests.servers import free_ports

import penstock
from penstock.buffer import Consumer, ConsumerConfig
from penstock.spark.session.java import ensure_java

START_DEADLINE_S = 90.0
# Two addresses of one machine: Spark never runs two attempts of a task on one host.
WORKER_HOSTS = ("127.0.0.1", "127.0.0.2")
HOME = Path(pyspark.__file__).parent
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A running cluster, given by the address of its master."""

    master: str

    @property
    def conf(self) -> dict[str, str]:
        """The settings of a session that uses the whole cluster and starts once all of it is available."""
        return {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": QUICK_JAVA,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": QUICK_JAVA,
            "spark.cores.max": str(len(WORKER_HOSTS)),
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
            "spark.locality.wait": "0s",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        }


@contextlib.contextmanager
def standalone_cluster(directory: Path) -> Iterator[Cluster]:
    """Run a cluster with its logs and its executors' folders below `directory` until the context ends."""
    environment = _environment() | {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA}
    launcher = str(HOME / "bin" / "spark-class")
    (port,) = free_ports(1)
    master = f"spark://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        log = directory / "master.log"
        deploy = "org.apache.spark.deploy"
        command = [launcher, f"{deploy}.master.Master", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--webui-port", "0"]
        process = stack.enter_context(_daemon(command, log, environment))
        _wait_for(process, log, "I have been elected leader", 1)
        for number, host in enumerate(WORKER_HOSTS):
            command = [launcher, f"{deploy}.worker.Worker", master, "--host", host, "--webui-port", "0"]
            command += ["-c", "1", "-m", "1g", "-d", str(directory / f"worker-{number}")]
            stack.enter_context(_daemon(command, directory / f"worker-{number}.log", environment))
        _wait_for(process, log, "Registering worker", len(WORKER_HOSTS))
        yield Cluster(master=master)


@contextlib.contextmanager
def connect_server(directory: Path, more: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a Spark Connect server on two local cores in `directory` until the context ends. Yield the URL."""
    (port,) = free_ports(1)
    conf = {
        "spark.master": "local[2]",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": QUICK_JAVA,
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        **(more or {}),
    }
    command = [str(HOME / "bin" / "spark-submit")]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    for name, value in conf.items():
        command += ["--conf", f"{name}={value}"]
    log = directory / "connect.log"
    with _daemon(command, log, _environment()) as process:
        _wait_for(process, log, "Spark Connect server started at", 1)
        yield f"sc://127.0.0.1:{port}"


def _environment() -> dict[str, str]:
    return os.environ | {
        "JAVA_HOME": str(ensure_java().home),
        "SPARK_HOME": str(HOME),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(penstock.__file__).parents[1]),
    }


@contextlib.contextmanager
def _daemon(
    command: list[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    try:
        yield process
    finally:
        process.terminate()  # lets a worker end its executors
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], log: Path, sentence: str, times: int) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while log.read_text().count(sentence) < times:
        assert process.poll() is None, f"it ended at once:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"{log} never says {sentence!r}:\n{log.read_text()[-3000:]}"
        time.sleep(0.05)


def queued(store: Path) -> list[bytes]:
    """Return every record in the queue at `store`."""

    async def work() -> list[bytes]:
        consumer = await Consumer.open(ConsumerConfig(store=str(store)))
        found: list[bytes] = []
        while (batch := await consumer.next_batch()) is not None:
            found += [bytes(record) for record in batch.entries]
        await consumer.close()
        return found

    return asyncio.run(work())
