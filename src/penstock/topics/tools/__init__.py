"""Operator tools on a data directory: verify, backup, restore."""

from __future__ import annotations

from penstock.topics.tools.backup import backup
from penstock.topics.tools.backup_manifest import BackupManifest
from penstock.topics.tools.restore import restore
from penstock.topics.tools.verify import verify
from penstock.topics.tools.verify_report import Finding, Severity, VerifyReport

__all__ = ["BackupManifest", "Finding", "Severity", "VerifyReport", "backup", "restore", "verify"]
