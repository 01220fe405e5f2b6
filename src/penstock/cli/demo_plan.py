"""How large the demo is, where it keeps its files, and the pipeline it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final

from penstock.cli.demo_journal import Journal, read_journal

__all__ = ["ROWS", "TOTALS", "Plan", "pipeline_text"]

ROWS: Final = "clicks"
TOTALS: Final = "clicks_per_page"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the demo."""

    folder: Path
    """Journals, logs, the pipeline's file, its checkpoint and ledger; without `store` everything."""
    store: str | None
    """The address of a folder for the queue and the tables, which nobody else uses."""
    producers: int
    records: int
    """Events per producer."""
    seconds: float
    """Over which they are spread."""
    since_ms: int
    """The time of the first event."""

    @property
    def pipeline_file(self) -> Path:
        return self.folder / "clicks.yaml"

    @property
    def queue(self) -> str:
        return str(self.folder / "queue") if self.store is None else f"{self.store}/queue"

    def table(self, name: str) -> str:
        return str(self.folder / "tables" / name) if self.store is None else f"{self.store}/tables/{name}"

    @property
    def rate(self) -> float:
        """Events per second and producer."""
        return max(1.0, self.records / self.seconds)

    @property
    def release(self) -> Path:
        """Until this file exists the producers keep something back: the kills shall find them busy."""
        return self.folder / "release"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def journal(self, producer: int) -> Path:
        return self.folder / f"producer-{producer}.journal"

    def journals(self) -> dict[int, Journal]:
        """Every producer's journal, read in full."""
        return {producer: read_journal(self.journal(producer)) for producer in range(self.producers)}


_PIPELINE: Final = """\
# Clicks from a queue into Delta tables, each once. Checked by: penstock audit clicks.yaml --deep
name: clicks

source:
  buffer: {store: $queue}

decode:
  format: json
  schema: >-
    producer INT NOT NULL, number BIGINT NOT NULL,
    user STRING NOT NULL, url STRING NOT NULL, at TIMESTAMP NOT NULL

# The place of each record in the queue (_shard, _sequence, _index) lets the audit compare them one by one.
transform: |
  SELECT date(at) AS day, user, url, at, producer, number, _shard, _sequence, _index
  FROM input

sinks:
  $rows_name:
    delta: {path: $rows, partition_by: [day]}
  $totals_name:
    transform: SELECT day, url, count(*) AS clicks FROM transformed GROUP BY day, url
    delta: {path: $totals, merge: {keys: [day, url], add: [clicks]}}

# What does not decode is kept here, with the reason.
on_error: dead_letter
dead_letter:
  delta: {path: $letters}

trigger: {interval: 1s, max_batches: 100}
checkpoint: checkpoint
spark: {spark.master: "local[2]"}
"""


def pipeline_text(plan: Plan) -> str:
    """The pipeline as YAML. Without a store its paths are relative, so that the folder can be moved."""
    queue, tables = ("queue", "tables") if plan.store is None else (plan.queue, f"{plan.store}/tables")
    return Template(_PIPELINE).substitute(
        queue=json.dumps(queue),
        rows_name=ROWS,
        rows=json.dumps(f"{tables}/{ROWS}"),
        totals_name=TOTALS,
        totals=json.dumps(f"{tables}/{TOTALS}"),
        letters=json.dumps(f"{tables}/dead_letters"),
    )
