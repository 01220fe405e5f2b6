"""Operator tools on a data directory: verify, backup, restore."""

from __future__ import annotations

from penstock.topics.tools.backup import BackupManifest, backup
from penstock.topics.tools.restore import restore
from penstock.topics.tools.verify import FileFinding, VerifyReport, verify

__all__ = ["BackupManifest", "FileFinding", "VerifyReport", "backup", "restore", "verify"]
