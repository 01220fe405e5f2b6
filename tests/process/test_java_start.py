"""PySpark starting a Java that is killed, refuses to run, or has nothing to say.

The start is PySpark's own, with its scripts; only the Java is a small program.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import SparkContext

from penstock.errors import PenstockError, Unavailable, Unsupported
from penstock.spark.session.failures import explain
from penstock.spark.session.java_process import launch_java

JAVA = """#!/bin/sh
case "$*" in
*org.apache.spark.launcher.Main*)
  {launcher}
  printf '\\0\\n%s\\0start\\0' "$0"
  exit ;;
esac
{java}
"""
REFUSES = (
    "echo \"Unrecognized VM option 'Foo'\" >&2; echo 'Error: Could not create the Java Virtual Machine.' >&2"
)


@pytest.fixture(autouse=True)
def _no_java_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests before these have started."""
    monkeypatch.setattr(SparkContext, "_gateway", None)
    monkeypatch.setattr(SparkContext, "_jvm", None)


def install(root: Path, monkeypatch: pytest.MonkeyPatch, java: str, *, launcher: str = ":") -> None:
    program = root / "bin" / "java"
    program.parent.mkdir()
    program.write_text(JAVA.format(java=java, launcher=launcher))
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(root))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)


@pytest.mark.parametrize(
    ("java", "launcher", "kind", "sentence"),
    [
        ("kill -9 $$", ":", Unavailable, "was killed by signal 9 before Spark was ready"),
        (f"{REFUSES}; kill -15 $$", ":", Unavailable, "was killed by signal 15 before Spark was ready"),
        (f"{REFUSES}; exit 1", ":", Unsupported, "ready: Unrecognized VM option 'Foo'. Correct"),
        ("exit 1", ":", Unavailable, "exit code 1 before Spark was ready and gave no reason"),
        (":", "kill -9 $$", Unavailable, "Spark's launcher ends like that when it is killed"),
        (":", f"{REFUSES}; exit 1", Unsupported, "ready: Unrecognized VM option 'Foo'. Correct"),
    ],
    ids=["killed", "words and killed", "refuses", "silent", "launcher killed", "launcher refuses"],
)
def test_how_java_ended_decides_whether_to_try_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    java: str,
    launcher: str,
    kind: type[PenstockError],
    sentence: str,
) -> None:
    install(tmp_path, monkeypatch, java, launcher=launcher)
    heard: list[str] = []
    with pytest.raises(kind) as caught:
        launch_java({"spark.master": "local[1]"}, heard.append)
    assert type(caught.value) is kind
    assert sentence in str(caught.value)
    assert ("Unrecognized VM option 'Foo'" in heard) is (REFUSES in java + launcher)
    assert SparkContext._gateway is None


def test_the_signal_is_known_even_if_nobody_reads_what_java_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "kill -9 $$")
    with pytest.raises(Unavailable, match="was killed by signal 9"):
        launch_java({})


def test_the_status_is_where_pyspark_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.java_gateway import launch_gateway

    install(tmp_path, monkeypatch, "kill -9 $$")
    with pytest.raises(Exception, match="JAVA_GATEWAY_EXITED") as caught:
        launch_gateway()
    assert isinstance(explain(caught.value), Unavailable)


LEAVES_NOTHING = """
import os
from penstock.errors import Unavailable
from penstock.spark.session.java_process import java_ending, launch_java

for turn in range(3):
    before = sorted(os.listdir("/proc/self/fd"))
    try:
        launch_java({}, lambda _: None)
    except Unavailable:
        left = sorted(os.listdir("/proc/self/fd"))
        assert turn == 0 or left == before, (before, left)
    else:
        raise SystemExit("this Java starts")
assert java_ending() is None
"""


def test_no_descriptor_and_no_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, where no thread of another test opens or closes a descriptor."""
    install(tmp_path, monkeypatch, "exit 1")
    subprocess.run([sys.executable, "-c", LEAVES_NOTHING], check=True, timeout=100)
