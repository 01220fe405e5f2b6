"""I12 and I6: for any crash point, the multiset in every sink equals the multiset produced."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.dataset
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession
from tests.spark.database_queues import entries_in, points_in, queued

import penstock
from penstock.buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from penstock.config import Setting
from penstock.spark.pipeline import Pipeline, RunningPipeline
from penstock.spark.pipeline.ledger import Ledger
from penstock.spark.pipeline.microbatch import MicroBatches
from penstock.spark.pipeline.outputs import Output
from penstock.spark.pipeline.spec import read_spec

DRIVER = Path(__file__).with_name("chaos_driver.py")
SINKS = 7
LAST_STEP = SINKS + 2  # the plan, every sink, the dead letters, the ledger

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


@dataclass(slots=True)
class Works:
    """A queue, a pipeline with a sink of every kind, and the processes that run it."""

    root: Path
    good: Counter[int] = field(default_factory=Counter)
    bad: Counter[bytes] = field(default_factory=Counter)
    extra: dict[str, Setting] = field(default_factory=dict)
    columns: str = "n"
    number: int = 0

    @property
    def catalog(self) -> dict[str, str]:
        return {
            "name": "chaos",
            "type": "sql",
            "uri": f"sqlite:///{self.root}/catalog.db",
            "warehouse": f"file://{self.root}/warehouse",
        }

    def settings(self) -> dict[str, Setting]:
        return {
            "name": "chaos",
            "source": {"buffer": {"store": "store", "gc_interval": "1s", "gc_grace_period": "0s"}},
            "decode": {"format": "json", "schema": "n bigint not null"},
            "transform": f"SELECT {self.columns}, n % 3 AS part, _sequence, _index FROM input",
            "sinks": {
                "delta": {"delta": {"path": "delta", "partition_by": ["part"]}},
                "parquet": {"parquet": {"path": "parquet", "partition_by": ["part"]}},
                "iceberg": {"iceberg": {"table": "lake.chaos", "catalog": self.catalog}},
                "buffer": {
                    "buffer": {"store": "copies"},
                    "transform": "SELECT CAST(n AS string) AS value FROM transformed",
                },
                "totals": {
                    "delta": {"path": "totals", "merge": {"keys": ["part"], "add": ["records", "total"]}},
                    "transform": "SELECT part, count(*) AS records, sum(n) AS total FROM transformed "
                    "GROUP BY part",
                },
                "points": {
                    "timeseries": {"store": "points", "metric": "n"},
                    "transform": "SELECT CAST(part AS string) AS part, n AS value, "
                    "timestamp_seconds(1700000000 + n) AS timestamp FROM transformed",
                },
                "vectors": {
                    "vector": {"store": "vectors"},
                    "transform": "SELECT CAST(n AS string) AS id, array(float(n)) AS vector FROM transformed",
                },
            },
            "trigger": {"max_batches": 3},
            **self.extra,
        }

    def produce(self, batches: int, each: int = 40) -> None:
        """Produce `batches` batches of `each` records, with one bad record."""

        async def work() -> None:
            config = ProducerConfig(store=str(self.root / "store"), flush_interval="1h")
            async with Producer(config) as producer:
                for _ in range(batches):
                    numbers = range(self.number, self.number + each)
                    self.number += each
                    bad = f"bad {self.number}".encode()
                    await producer.produce([*(b'{"n":%d}' % n for n in numbers), bad])
                    await producer.flush()
                    self.good.update(numbers)
                    self.bad[bad] += 1

        asyncio.run(work())

    def run(self, step: int | None = None, *, ends_well: bool = True) -> str:
        file = self.root / "settings.json"
        file.write_text(json.dumps(self.settings()))
        source = str(Path(penstock.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, str(DRIVER), str(file), *([] if step is None else [str(step)])],
            check=False,
            env=os.environ | {"PYTHONPATH": source},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=250,
            start_new_session=True,
        )
        if step is not None:
            assert done.returncode == -9, done.stderr[-3000:]
        elif ends_well:
            assert done.returncode == 0, done.stderr[-3000:]
        return done.stderr

    def start(self, spark: SparkSession) -> RunningPipeline:
        return Pipeline(read_spec(self.settings(), base=self.root)).start(spark, once=True)

    def assert_exact(self) -> None:
        """Compare every sink with the produced records, using a plain reader of its format."""
        delta = DeltaTable(str(self.root / "delta")).to_pyarrow_table(columns=["n"])
        parquet = pyarrow.dataset.dataset(self.root / "parquet", partitioning="hive").to_table(columns=["n"])
        iceberg = load_catalog(**self.catalog).load_table("lake.chaos").scan().to_arrow()
        for table in (delta, parquet, iceberg):
            assert Counter(table.column("n").to_pylist()) == self.good
        assert Counter(int(record) for record, _ in queued(self.root / "copies")) == self.good
        assert Counter(value for _, value in points_in(self.root / "points", "part")) == self.good
        assert Counter(int(name) for name, _ in entries_in(self.root / "vectors")) == self.good
        letters = DeltaTable(str(self.root / "delta_dead_letters")).to_pyarrow_table(columns=["value"])
        assert Counter(letters.column("value").to_pylist()) == self.bad
        totals = DeltaTable(str(self.root / "totals")).to_pyarrow_table().to_pylist()
        expected = {
            part: (len(numbers), sum(numbers))
            for part in range(3)
            if (numbers := [n for n in self.good.elements() if n % 3 == part])
        }
        assert {row["part"]: (row["records"], row["total"]) for row in totals} == expected


@pytest.fixture
def works(tmp_path: Path) -> Works:
    return Works(root=tmp_path)


@pytest.mark.parametrize(
    "steps",
    [(0, 1), (SINKS, LAST_STEP)],
    ids=["when planned, after a sink", "after all sinks, after the ledger"],
)
def test_a_driver_that_is_killed_loses_and_doubles_nothing(works: Works, steps: tuple[int, ...]) -> None:
    for step in steps:
        works.produce(2)
        works.run(step)
    works.produce(2)
    works.run()
    works.assert_exact()


class Crash(Exception):
    """The simulated end of a driver between two steps. The same Spark continues with a new query."""


def test_a_micro_batch_that_ends_after_any_step_is_repeated_exactly(
    works: Works, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [0]

    def counted(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def step(*arguments: object, **named: object) -> object:
            result = original(*arguments, **named)
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return result

        monkeypatch.setattr(owner, name, step)

    counted(Output, "save")
    counted(MicroBatches, "_merge")
    counted(Ledger, "write")
    for step in range(1, LAST_STEP + 1):
        works.produce(1)
        left[0] = step
        with pytest.raises(Exception, match="Crash"):
            works.start(spark).wait(200)
    works.produce(1)
    left[0] = 0
    assert works.start(spark).wait(200)
    works.assert_exact()


_FAIL_ONCE = """
def fail_once(n):
    import os
    if n == {number} and not os.path.exists({marker!r}):
        open({marker!r}, "w").close()
        {deed}
    return n
"""
# The source, this function and the sink each have their own worker under one daemon.
_KILL_WORKERS = """
        import signal
        daemon = os.getppid()
        for pid in map(int, open(f"/proc/{daemon}/task/{daemon}/children").read().split()):
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "deed", ["raise ValueError('this attempt fails')", _KILL_WORKERS], ids=["task fails", "workers killed"]
)
def test_a_failing_task_has_no_effect(works: Works, deed: str) -> None:
    works.columns = "fail_once(n) AS n"
    marker = str(works.root / "failed")
    works.extra["functions"] = {"fail_once": _FAIL_ONCE.format(number=70, marker=marker, deed=deed.strip())}
    works.produce(3)
    works.run()
    assert Path(marker).exists()
    works.assert_exact()


def test_a_consumer_that_takes_over_in_the_middle_stops_the_pipeline_and_a_restart_is_exact(
    works: Works,
) -> None:
    works.columns = "fail_once(n) AS n"
    marker = str(works.root / "fenced")
    deed = (
        "import asyncio; from penstock.buffer import Consumer, ConsumerConfig; "
        f"asyncio.run(Consumer.open(ConsumerConfig(store={str(works.root / 'store')!r})))"
    )
    works.extra["functions"] = {"fail_once": _FAIL_ONCE.format(number=10, marker=marker, deed=deed)}
    works.produce(8)
    assert "no longer owns" in works.run(ends_well=False)
    works.run()
    works.assert_exact()


def test_garbage_collected_between_micro_batches_is_never_missed(works: Works) -> None:
    works.produce(9)
    works.run()
    works.produce(3)
    works.run()
    works.assert_exact()

    async def left() -> int:
        consumer = await Consumer.open(ConsumerConfig(store=str(works.root / "store")))
        length = len(await consumer.entries())
        await consumer.close()
        return length

    assert asyncio.run(left()) <= 3  # only the last micro-batch is still in the queue
    assert len(list((works.root / "store" / "ingest").glob("*.batch"))) < 12  # the collector was at work
