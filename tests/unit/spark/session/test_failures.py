"""`failures/` contains the output of Spark 4.3 for each fault, with shortened Java stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.buffer.errors import BatchMissing
from penstock.errors import (
    ConfigError,
    Conflict,
    Fenced,
    InvalidInput,
    PenstockError,
    StorageFull,
    Unavailable,
    Unsupported,
)
from penstock.spark.session.failures import explain
from penstock.spark.sources.offsets import QueueGap

TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("failures/*.txt")}

LOST = "is in the queue but not in the store. It may have been consumed"
ANOTHER = "the checkpoint has read ingest/manifest up to 2, but it has handed out numbers only up to 0"
NO_S3 = "Put the checkpoint on a local or shared disk"

CASES: dict[str, tuple[type[PenstockError], str]] = {
    "checkpoint-is-file": (ConfigError, "Spark cannot write to /data/cp"),
    "connect-died": (Unavailable, "a Python worker died"),
    "connect-foreach": (Conflict, "the table refuses"),
    "connect-foreach-missing": (BatchMissing, LOST),
    "connect-gap": (QueueGap, ANOTHER),
    "connect-missing-batch": (BatchMissing, LOST),
    "connect-option": (ConfigError, "option 'colums': unknown key, did you mean 'columns'?"),
    "connect-scheme-s3": (Unsupported, NO_S3),
    "connect-server": (Unavailable, "the Spark Connect server does not respond"),
    "connect-slow-worker": (Unavailable, "waits ten seconds for a Python worker to start"),
    "connect-unwritable": (ConfigError, "Spark cannot write to file:/proc/nowhere/cp"),
    "died": (Unavailable, "a Python worker died"),
    "foreach": (Conflict, "the table refuses"),
    "foreach-missing": (BatchMissing, LOST),
    "gap": (QueueGap, ANOTHER),
    "java-exits": (Unsupported, "Java is missing or older than 17"),
    "killed-stream": (Unavailable, "a Python worker died"),
    "log-version": (Unsupported, "written by a newer Spark"),
    "master": (Unavailable, "the master did not respond"),
    "missing-batch": (BatchMissing, LOST),
    "missing-stream": (BatchMissing, LOST),
    "nomodule-udf": (Unsupported, "executors cannot import obstoreless"),
    "nopenstock-batch": (Unsupported, "executors cannot import penstock: install the same version"),
    "nopenstock-udf": (Unsupported, "executors cannot import penstock: install the same version"),
    "nopython-batch": (Unsupported, "Spark cannot start /opt/none/python3 as the Python of its workers"),
    "option": (ConfigError, "option 'colums': unknown key, did you mean 'columns'?"),
    "other-source-kind": (ConfigError, "another kind of source"),
    "other-sources": (ConfigError, "another query, which has 1 sources instead of 2"),
    "other-state": (ConfigError, "aggregates or joins in another way"),
    "range": (InvalidInput, "ingest/manifest holds the sequences 0 to 0; 9 is outside"),
    "scheme-s3": (Unsupported, "no file system for s3://"),
    "scheme-s3a": (Unsupported, "no file system for s3a://"),
    "slow-worker": (Unavailable, "waits ten seconds for a Python worker to start"),
    "to-stateful": (ConfigError, "aggregates or joins in another way"),
    "unwritable": (ConfigError, "Spark cannot write to file:/proc/nowhere/cp"),
    "version-batch": (Unsupported, "the workers run Python 3.12, the driver runs 3.11"),
    "version-udf": (Unsupported, "the workers run Python 3.12, the driver runs 3.11"),
}


class FromSpark(Exception):
    """A stand-in for Spark's many classes: only the text counts."""


def explained(text: str) -> PenstockError:
    error = explain(FromSpark(text))
    assert error is not None
    return error


def test_every_text_has_its_case() -> None:
    assert sorted(TEXTS) == sorted(CASES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_output_of_spark_becomes_one_sentence(name: str) -> None:
    kind, sentence = CASES[name]
    error = explained(TEXTS[name])
    assert type(error) is kind
    assert sentence in str(error)
    for noise in ("Traceback", "SQLSTATE", "\n", "JVM stacktrace", "Exception:", "runId"):
        assert noise not in str(error)


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log.", Fenced, "the same checkpoint"),
        ("java.io.IOException: No space left on device", StorageFull, "is full"),
        ("java.io.FileNotFoundException: /cp/0 (Permission denied)", ConfigError, "cannot write to /cp/0"),
        ("java.lang.OutOfMemoryError: Java heap space", Unavailable, "spark.driver.memory"),
        ("java.net.ConnectException: Connection refused", Unavailable, "could not connect"),
        ("All masters are unresponsive! Giving up.", Unavailable, "the master did not respond"),
        (
            "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: penstock-topic. Make sure the provider",
            Unsupported,
            "does not know the format penstock-topic in this session",
        ),
        (
            "ImportError: cannot import name 'Hole' from 'penstock.spark.sources.gaps' (/x.py)",
            Unsupported,
            "penstock.spark.sources.gaps on the workers has no Hole: their version of Penstock",
        ),
        (
            "AttributeError: Can't get attribute 'Hole' on <module 'penstock.spark.sources.gaps' from '/x'>",
            Unsupported,
            "their version of Penstock differs",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_other_known_messages_of_spark_become_one_sentence(
    text: str, kind: type[PenstockError], sentence: str
) -> None:
    error = explained(f"Job aborted due to stage failure: {text}")
    assert type(error) is kind
    assert sentence in str(error)


def test_the_error_that_was_raised_last_is_reported_and_not_its_cause() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "a.py", line 1, in a\n'
        "penstock.errors.Unavailable: the store is away\n"
        "\n"
        "The above exception was the direct cause of the following exception:\n"
        "\n"
        "Traceback (most recent call last):\n"
        '  File "a.py", line 2, in a\n'
        "penstock.errors.Conflict: somebody else was first\n"
        " SQLSTATE: 38000 SQLSTATE: XXKST\n"
    )
    error = explained(text)
    assert (type(error), str(error)) == (Conflict, "somebody else was first")


def test_a_sentence_over_several_lines_is_kept() -> None:
    error = explained("Traceback:\npenstock.errors.ConfigError: two wrongs:\n- one\n- two\n SQLSTATE: 38000")
    assert str(error) == "two wrongs:\n- one\n- two"


@pytest.mark.parametrize("name", ["penstock.errors.Gone", "penstock.nowhere.Gone", "penstock.errors.Final"])
def test_an_unknown_error_of_ours_is_reported_as_the_base_class(name: str) -> None:
    error = explained(f"Traceback:\n{name}: that is that")
    assert (type(error), str(error)) == (PenstockError, "that is that")


def test_an_error_of_ours_in_the_chain_is_returned_unchanged() -> None:
    cause = Conflict("first")
    error = FromSpark("the wrapper")
    error.__cause__ = cause
    assert explain(error) is cause
    assert explain(cause) is cause


def test_the_plan_after_the_message_is_not_searched() -> None:
    text = (
        "boom\n=== Streaming Query ===\nProject [No FileSystem for scheme s3]\npenstock.errors.Conflict: no"
    )
    assert explain(FromSpark(text)) is None


def test_an_unknown_error_is_not_explained() -> None:
    assert explain(ValueError("unheard of")) is None
    assert explain(ModuleNotFoundError("No module named 'penstock'")) is None


def test_an_error_without_a_readable_message_is_not_explained() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ConnectionError("Java has ended")

    assert explain(Silent()) is None


def test_credentials_in_a_path_are_not_repeated() -> None:
    error = explained("java.io.IOException: Mkdirs failed to create s3a://key:hush@bucket/cp (exists=false)")
    assert "hush" not in str(error)
    assert "s3a://***@bucket/cp" in str(error)
