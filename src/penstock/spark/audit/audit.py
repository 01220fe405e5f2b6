"""The audit of a pipeline: read its durable state, reconcile it, and with `deep` compare every record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.config import unknown_key
from penstock.errors import Unsupported
from penstock.findings import Severity
from penstock.spark.audit.inputs import Evidence, Tell, apps_in_ledger, query_of
from penstock.spark.audit.ledger_reader import AuditFinding, Facts
from penstock.spark.audit.positions import Places, PositionScan, compare_places, open_scan, windows
from penstock.spark.audit.reconcile import Balance, balance
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.pipeline.outputs import table_of
from penstock.spark.pipeline.sink_spec import SinkSpec
from penstock.spark.pipeline.spec import PipelineSpec

_IN_SINKS: Final = ("_shard", "_sequence", "_index")
_IN_LETTERS: Final = ("shard", "sequence", "index")
_ADDRESS: Final = re.compile(r"https?://\S+")
"""Addresses in messages, which are masked: the address of a store may contain a signature."""
_NOTHING: Final = Places.gather([])


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit."""

    pipeline: str
    query: str | None
    """The id of the query, or None if the pipeline never ran and every record is in flight."""
    deep: bool
    balance: Balance

    @property
    def balanced(self) -> bool:
        return self.balance.balanced


def audit_pipeline(
    spec: PipelineSpec, *, sink: str | None = None, deep: bool = False, tell: Tell = lambda _: None
) -> AuditReport:
    """Audit a pipeline, which may be running, without Spark and without changing anything.

    If the totals do not balance, read everything a second time and report only the second result. Raise
    `ConfigError` for an unknown `sink`, and `StorageError`, `Corrupt` or `Unavailable` if a part of the state
    cannot be read.
    """
    sinks = spec.outputs
    if sink is not None:
        if sink not in sinks:
            raise unknown_key(f"--sink {sink}", sink, sinks)
        sinks = {sink: sinks[sink]}
    evidence = Evidence(spec, sinks, tell)
    report = _once(spec, sinks, evidence, deep, tell)
    return report if report.balanced else _once(spec, sinks, evidence, deep, tell)


def _once(
    spec: PipelineSpec, sinks: Mapping[str, SinkSpec], evidence: Evidence, deep: bool, tell: Tell
) -> AuditReport:
    apps = apps_in_ledger(spec)
    query = query_of(evidence.checkpoint, apps)
    facts = evidence.read(query)
    closed = balance(facts)
    findings = [*closed.findings, *_about_queries(evidence, query, apps)]
    if deep:
        for name, one in sinks.items():
            findings += _deep(name, one, spec, facts, tell)
    return AuditReport(
        pipeline=spec.name, query=query, deep=deep, balance=replace(closed, findings=tuple(findings))
    )


def _note(subject: str, text: str, advice: str = "") -> AuditFinding:
    return AuditFinding(severity=Severity.NOTE, subject=subject, text=text, advice=advice)


def _about_queries(evidence: Evidence, query: str | None, apps: Mapping[str, int]) -> Iterator[AuditFinding]:
    checkpoint = evidence.checkpoint
    if not checkpoint.is_local:
        if query is not None:
            yield _note(
                "checkpoint",
                f"{checkpoint.path} cannot be read without Spark, so plans and commits are not compared",
            )
    elif query is not None and checkpoint.query_id is None:
        yield AuditFinding(
            severity=Severity.PROBLEM,
            subject="checkpoint",
            text=f"{checkpoint.path} is gone, but the ledger has lines of query {query}",
            advice="restore it: otherwise the pipeline starts over and delivers the queue's records again",
        )
    others = sorted(app for app in apps if app != query)
    if others:
        yield _note(
            "ledger",
            f"also has lines of {len(others)} other queries, with other checkpoints "
            f"({', '.join(others[:3])}): their deliveries are not part of this audit",
        )


def _deep(name: str, sink: SinkSpec, spec: PipelineSpec, facts: Facts, tell: Tell) -> Iterator[AuditFinding]:
    """Compare every record of a sink by its position, if the sink has positions."""
    subject = f"sink {name}"
    lines = [line for line in facts.lines if name in line.rows]
    if not lines:
        return
    if any(line.dropped(name) is None for line in lines):
        yield _note(subject, "records are not compared one by one: a record may have several rows, or none")
        return
    try:
        scan = _scan_of(sink)
        letters = None if spec.letters is None else _scan_of(spec.letters)
        missing = [] if scan is None else sorted({*_needed(facts)} - scan.columns)
        if scan is None or missing:
            what = f"has no {', '.join(missing)}" if missing else "is not a table with record positions"
            advice = f"select {', '.join(missing)} in the transform to have them compared" if missing else ""
            yield _note(subject, f"records are not compared one by one: {sink.place} {what}", advice)
            return
        for window in windows(lines):
            last = window[-1].batch
            tell(
                f"comparing records of {name}: micro-batches {window[0].batch} to {last} of {lines[-1].batch}"
            )
            there = Places.gather(_places(scan, _IN_SINKS, window, None))
            dead = _NOTHING
            if letters is not None and any(line.dead for line in window):
                dead = Places.gather(_places(letters, _IN_LETTERS, window, spec.name))
            yield from compare_places(name, window, there, dead, facts)
    except Unsupported as error:
        yield _note(subject, f"records are not compared one by one: {error}")
    except (pa.ArrowException, OSError) as error:
        yield AuditFinding(
            severity=Severity.PROBLEM,
            subject=subject,
            text=f"{sink.place} cannot be read: {_ADDRESS.sub('(address)', str(error))[:300]}",
            advice="a file of the table is lost or damaged; restore it",
        )


def _scan_of(sink: SinkSpec) -> PositionScan | None:
    table = table_of(sink)
    return None if table is None else open_scan(table)


def _needed(facts: Facts) -> tuple[str, ...]:
    return _IN_SINKS if len(facts.queue) > 1 else _IN_SINKS[1:]


def _places(
    scan: PositionScan, names: tuple[str, str, str], window: list[BatchLine], pipeline: str | None
) -> Iterator[Places]:
    """Yield the positions of a window in a table, for dead letters only those of `pipeline`."""
    shard, sequence, index = names
    low, high = min(window[0].start.values(), default=0), max(window[-1].end.values(), default=0) - 1
    columns = [name for name in names if name in scan.columns] + ["pipeline"] * (pipeline is not None)
    for batch in scan.read(columns, sequence, low, high):
        mine = batch if pipeline is None else batch.filter(pc.equal(batch.column("pipeline"), pipeline))
        if mine.num_rows == 0:
            continue
        yield Places(
            shard=_numbers(mine, shard) if shard in columns else np.zeros(mine.num_rows, np.int64),
            sequence=_numbers(mine, sequence),
            index=_numbers(mine, index),
        ).within(window)


def _numbers(batch: pa.RecordBatch, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    whole: np.ndarray[tuple[int], np.dtype[np.int64]] = pc.fill_null(
        batch.column(name).cast(pa.int64()), -1
    ).to_numpy(zero_copy_only=False)
    return whole
