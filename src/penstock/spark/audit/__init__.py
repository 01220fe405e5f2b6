"""The audit of a pipeline, which compares the queue, checkpoint, ledger and tables record by record."""

from __future__ import annotations

from penstock.spark.audit.audit import AuditReport, audit_pipeline

__all__ = ["AuditReport", "audit_pipeline"]
