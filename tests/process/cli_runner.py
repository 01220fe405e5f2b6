"""Runs `penstock` for the tests: as a process where it reads input or is killed, else in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import penstock as package
from penstock.cli.main import main

__all__ = ["Told", "command", "environment", "penstock"]

SRC = Path(package.__file__).parents[1]
"""Of the package that this process has, so that a mutant is what its processes run, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a command printed."""

    stdout: bytes
    stderr: bytes


def environment(**extra: str) -> dict[str, str]:
    """The environment without settings of the machine that runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return kept | {"PYTHONPATH": str(SRC), "PYTHONWARNINGS": "error"} | extra


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "penstock.cli", *map(str, arguments)]


def penstock(*arguments: str | Path, given: bytes | None = None, code: int = 0, **extra: str) -> Told:
    """Run it and check its exit code. With `given` it is a process that reads this."""
    if given is None:
        ended, told = _run_here([str(argument) for argument in arguments], environment(**extra))
    else:
        run = subprocess.run(
            command(*arguments),
            input=given,
            capture_output=True,
            timeout=60,
            check=False,
            env=environment(**extra),
        )
        ended, told = run.returncode, Told(stdout=run.stdout, stderr=run.stderr)
    assert ended == code, (ended, told)
    assert b"Traceback" not in told.stderr
    return told


def _run_here(arguments: list[str], environ: dict[str, str]) -> tuple[int, Told]:
    buffers = [io.BytesIO(), io.BytesIO()]
    streams = [io.TextIOWrapper(buffer, encoding="utf-8", write_through=True) for buffer in buffers]
    ended = 0
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        try:
            main(arguments)
        except SystemExit as leaving:
            ended = leaving.code if isinstance(leaving.code, int) else -1
    stdout, stderr = (buffer.getvalue() for buffer in buffers)
    return ended, Told(stdout=stdout, stderr=stderr)
