"""Why a redrive failed, as the console shows it."""

from __future__ import annotations

import pytest

from penstock.console.redrive import why_failed
from penstock.up import CommandOutcome


@pytest.mark.parametrize(
    ("code", "errors", "sentence"),
    [
        (-9, "a warning from before", "the command was killed by signal 9; the next redrive finishes"),
        (-9, "", "the command was killed by signal 9"),
        (2, "error: no such pipeline", "error: no such pipeline"),
        (1, "", "the command ended with exit code 1"),
    ],
)
def test_a_redrive_that_was_killed_has_that_as_its_error(code: int, errors: str, sentence: str) -> None:
    assert why_failed(CommandOutcome(exit_code=code, output="", errors=errors)).startswith(sentence)
