"""Penstock for Spark: sessions, sources, exactly-once sinks and pipelines.

    spark = build_session("clicks")
    stream = spark.readStream.format("penstock-buffer").option("store", "s3://ingest").load()

    Pipeline.from_yaml("clicks.yaml").start(spark).wait()

Importing this package starts nothing and needs neither Java nor PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.spark.audit import AuditReport, audit_pipeline
    from penstock.spark.audit.books import BooksReading, PipelineBooks, SinkCommit, SinkProgress
    from penstock.spark.audit.ledger_reader import AuditFinding
    from penstock.spark.audit.reconcile import Balance, SinkTotals
    from penstock.spark.pipeline import Pipeline, PipelineStatus, RunningPipeline
    from penstock.spark.pipeline.check import CheckResult, check_pipeline
    from penstock.spark.pipeline.checkpoint import Checkpoint
    from penstock.spark.pipeline.dead_letters import Letter, LetterPage, read_letters
    from penstock.spark.pipeline.ledger import BatchLine
    from penstock.spark.pipeline.outputs import check_options, table_of
    from penstock.spark.pipeline.redrive import Redrive, Redriven, Wanted, redrive
    from penstock.spark.pipeline.sink_spec import BufferSinkSpec, SinkSpec
    from penstock.spark.pipeline.spec import (
        DEAD_LETTERS,
        BufferSourceSpec,
        PipelineSpec,
        load_spec,
        read_spec,
    )
    from penstock.spark.session import (
        Ending,
        JavaHome,
        build_session,
        check_spark,
        ensure_java,
        explain,
        find_java,
        forget_java,
        java_ending,
        lost,
        register,
    )
    from penstock.spark.session.failures import explain_pipeline
    from penstock.spark.sources.queues import Backlog, QueueWatch
    from penstock.spark.tables import open_table
    from penstock.spark.tables.compact import CompactionReport, compact
    from penstock.spark.tables.delta import load_delta
    from penstock.spark.tables.spec import TableSpec

__all__ = [
    "DEAD_LETTERS",
    "AuditFinding",
    "AuditReport",
    "Backlog",
    "Balance",
    "BatchLine",
    "BooksReading",
    "BufferSinkSpec",
    "BufferSourceSpec",
    "CheckResult",
    "Checkpoint",
    "CompactionReport",
    "Ending",
    "JavaHome",
    "Letter",
    "LetterPage",
    "Pipeline",
    "PipelineBooks",
    "PipelineSpec",
    "PipelineStatus",
    "QueueWatch",
    "Redrive",
    "Redriven",
    "RunningPipeline",
    "SinkCommit",
    "SinkProgress",
    "SinkSpec",
    "SinkTotals",
    "TableSpec",
    "Wanted",
    "audit_pipeline",
    "build_session",
    "check_options",
    "check_pipeline",
    "check_spark",
    "compact",
    "ensure_java",
    "explain",
    "explain_pipeline",
    "find_java",
    "forget_java",
    "java_ending",
    "load_delta",
    "load_spec",
    "lost",
    "open_table",
    "read_letters",
    "read_spec",
    "redrive",
    "register",
    "table_of",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "pipeline": "Pipeline PipelineStatus RunningPipeline",
            "audit": "AuditReport audit_pipeline",
            "audit.books": "BooksReading PipelineBooks SinkCommit SinkProgress",
            "audit.reconcile": "Balance SinkTotals",
            "audit.ledger_reader": "AuditFinding",
            "pipeline.check": "CheckResult check_pipeline",
            "pipeline.checkpoint": "Checkpoint",
            "pipeline.ledger": "BatchLine",
            "pipeline.dead_letters": "Letter LetterPage read_letters",
            "pipeline.outputs": "check_options table_of",
            "pipeline.redrive": "Redrive Redriven Wanted redrive",
            "pipeline.sink_spec": "BufferSinkSpec SinkSpec",
            "pipeline.spec": "DEAD_LETTERS BufferSourceSpec PipelineSpec load_spec read_spec",
            "session": (
                "Ending JavaHome build_session check_spark ensure_java explain find_java forget_java "
                "java_ending lost register"
            ),
            "session.failures": "explain_pipeline",
            "sources.queues": "Backlog QueueWatch",
            "tables.compact": "CompactionReport compact",
            "tables.delta": "load_delta",
            "tables.spec": "TableSpec",
            "tables": "open_table",
        },
    )
