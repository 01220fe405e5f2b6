"""A pipeline in a separate process that dies at a given step.

    chaos_driver.py SETTINGS.json [STEP]

The steps of its first micro-batch: 0 when it is planned, then one after each sink, the dead letters and the
ledger. At STEP the whole process group is killed, including Java and the Python workers. Without STEP, the
driver processes the current records and ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.spark import build_session
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.ledger import Ledger
from penstock.spark.pipeline.microbatch import MicroBatches
from penstock.spark.pipeline.outputs import Output
from penstock.spark.pipeline.spec import read_spec


class Steps:
    def __init__(self, fatal: int | None) -> None:
        self._fatal = fatal
        self._done = 0

    def take(self) -> None:
        if self._done == self._fatal:
            os.killpg(0, signal.SIGKILL)
        self._done += 1

    def after(self, owner: type, name: str) -> None:
        original: Callable[..., object] = getattr(owner, name)

        def wrapped(*arguments: object, **named: object) -> object:
            result = original(*arguments, **named)
            self.take()
            return result

        setattr(owner, name, wrapped)

    def before(self, owner: type, name: str) -> None:
        original: Callable[..., object] = getattr(owner, name)

        def wrapped(*arguments: object, **named: object) -> object:
            self.take()
            return original(*arguments, **named)

        setattr(owner, name, wrapped)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    steps = Steps(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    steps.before(MicroBatches, "run")
    steps.after(Output, "save")
    steps.after(MicroBatches, "_merge")
    steps.after(Ledger, "write")
    conf = {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        **settings.pop("conf", {}),
    }
    spark = build_session("chaos", master="local[2,4]", conf=conf)
    for name, source in settings.pop("functions", {}).items():
        scope: dict[str, Callable[..., object]] = {}
        exec(source, scope)
        spark.udf.register(name, scope[name], "bigint")
    pipeline = Pipeline(read_spec(settings, base=Path(sys.argv[1]).parent))
    assert pipeline.start(spark, once=True).wait(200)
    spark.stop()


if __name__ == "__main__":
    main()
