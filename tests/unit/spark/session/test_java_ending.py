"""The meaning of the end of Spark's Java: wrong settings, or a temporary fault."""

from __future__ import annotations

import subprocess

import pytest

from penstock.errors import PenstockError, StorageFull, Unavailable, Unsupported
from penstock.spark.session.failures import explain
from penstock.spark.session.java_process import Ending, ending_in, lost, not_ready

EXITED = "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number."
NOISE = ["WARNING: Using incubator modules: jdk.incubator.vector", "Picked up JAVA_TOOL_OPTIONS: -Xss1m", ""]
REFUSED = [
    *NOISE,
    "Unrecognized VM option 'Foo'",
    "Error: Could not create the Java Virtual Machine.",
    "Error: A fatal exception has occurred. Program will exit.",
]
TOO_LARGE = [
    "Error occurred during initialization of VM",
    "Could not reserve enough space for 1073741824KB object heap",
]
NO_MEMORY = [
    "OpenJDK 64-Bit Server VM warning: INFO: os::commit_memory(0x1, 2, 0) failed; error='Not enough space'",
    "# There is insufficient memory for the Java Runtime Environment to continue.",
    "# An error report file with more information is saved as:",
]
MASTER = [
    "20:01:02 WARN NativeCodeLoader: Unable to load native-hadoop library",
    'Exception in thread "main" org.apache.spark.SparkException: Could not parse Master URL: mesos://me:pw@host',
    "\tat org.apache.spark.deploy.SparkSubmit.error(SparkSubmit.scala:1)",
    "\t... 3 more",
]
DISK = ['Exception in thread "main" java.io.IOException: No space left on device', "\tat java.base/x"]
NETWORK = ['Exception in thread "main" java.net.UnknownHostException: repo', "\tat java.base/x"]
LAUNCHER = ["/opt/spark/bin/spark-class: line 97: CMD: bad array subscript"]
NO_JAVA = ["/opt/spark/bin/spark-class: line 71: /opt/none/bin/java: No such file or directory", *LAUNCHER]


@pytest.mark.parametrize(
    ("returncode", "signal", "sentence"),
    [
        (-9, 9, "was killed by signal 9"),
        (-6, 6, "was killed by signal 6"),
        (143, 15, "was killed by signal 15"),  # Java catches it, runs its hooks and ends itself
        (137, 9, "was killed by signal 9"),
        (1, None, "ended with exit code 1"),
        (3, None, "ended with exit code 3"),
        (255, None, "ended with exit code 255"),
    ],
)
def test_an_exit_status_gives_the_signal(returncode: int, signal: int | None, sentence: str) -> None:
    ending = Ending(returncode=returncode)
    assert (ending.signal, str(ending)) == (signal, sentence)


@pytest.mark.parametrize(
    "words", [None, [], NOISE, REFUSED], ids=["not read", "none", "noise", "older words"]
)
@pytest.mark.parametrize("returncode", [-9, -11, 143])
def test_a_killed_java_is_a_temporary_fault(returncode: int, words: list[str] | None) -> None:
    error = not_ready(Ending(returncode=returncode), words)
    assert type(error) is Unavailable
    assert f"was killed by signal {Ending(returncode=returncode).signal} before Spark was ready" in str(error)


@pytest.mark.parametrize(
    ("words", "kind", "reason"),
    [
        (REFUSED, Unsupported, "Unrecognized VM option 'Foo'. Correct"),
        (TOO_LARGE, Unsupported, "Could not reserve enough space for 1073741824KB object heap. Correct"),
        (
            MASTER,
            Unsupported,
            "org.apache.spark.SparkException: Could not parse Master URL: mesos://***@host",
        ),
        (NO_JAVA, Unsupported, "/opt/none/bin/java: No such file or directory"),
        (NO_MEMORY, Unavailable, "insufficient memory for the Java Runtime Environment"),
        (NETWORK, Unavailable, "java.net.UnknownHostException: repo"),
        (DISK, StorageFull, "No space left on device"),
        ([], Unavailable, "gave no reason"),
        (NOISE, Unavailable, "gave no reason"),
        (LAUNCHER, Unavailable, "gave no reason"),
    ],
    ids=["option", "heap", "master", "no java", "memory", "network", "disk", "silent", "noise", "launcher"],
)
def test_a_java_that_exited_is_judged_by_its_output(
    words: list[str], kind: type[PenstockError], reason: str
) -> None:
    error = not_ready(Ending(returncode=1), words)
    assert type(error) is kind
    assert reason in str(error)
    assert "exit code 1" in str(error)
    assert "\n" not in str(error)


def test_the_message_refers_to_output_that_was_not_captured() -> None:
    error = not_ready(Ending(returncode=1), None)
    assert type(error) is Unsupported
    assert "has printed the reason above" in str(error)


def test_the_end_of_a_working_java_is_reported_with_its_signal() -> None:
    assert "was killed by signal 9 while it was working" in str(lost(Ending(returncode=-9)))
    assert "had no memory left" in str(lost(Ending(returncode=-9)))
    assert str(lost(Ending(returncode=143))) == "Spark's Java was killed by signal 15 while it was working"


def launch(command: str) -> None:
    """Fail as PySpark does: only a local variable has the status."""
    proc = subprocess.Popen(["/bin/sh", "-c", command])
    proc.wait()
    raise RuntimeError(EXITED)


@pytest.mark.parametrize(
    ("command", "kind", "sentence"),
    [
        ("kill -9 $$", Unavailable, "was killed by signal 9 before Spark was ready"),
        ("exit 1", Unsupported, "has printed the reason above"),
    ],
)
def test_a_java_that_another_session_has_started_is_explained_by_its_status(
    command: str, kind: type[PenstockError], sentence: str
) -> None:
    with pytest.raises(RuntimeError) as caught:
        launch(command)
    error = explain(caught.value)
    assert type(error) is kind
    assert sentence in str(error)


def test_an_error_without_a_process_has_no_ending() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError(EXITED)
    assert ending_in(caught.value) is None
