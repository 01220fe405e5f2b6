"""The Java that a process under test has started."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["java_of"]

_SUBMIT = b"org.apache.spark.deploy.SparkSubmit"


def java_of(parent: int, within_s: float = 150.0, other_than: int | None = None) -> int:
    """The number of the Java that is, or is going to be, Spark; waits until there is one."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
                is_child = int(fields.split()[1]) == parent
                found = int(stat.parent.name)
                is_new = is_child and name == "java" and found != other_than
                if is_new and _SUBMIT in stat.with_name("cmdline").read_bytes():
                    return found
            except (FileNotFoundError, ProcessLookupError):
                continue
        time.sleep(0.02)
    raise AssertionError(f"{parent} has started no Java")
