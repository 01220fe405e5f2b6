"""A `penstock` command as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_OUTPUT_BYTES_MAX: Final = 4 << 20
_ERROR_LINES: Final = 50
_NOT_STARTED: Final = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """How a command ended."""

    exit_code: int
    output: str
    """What it printed to standard output."""
    errors: str
    """The end of what it printed to standard error."""


async def run_penstock(
    arguments: Sequence[str],
    tell: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> CommandOutcome:
    """Run `penstock ARGUMENTS…` to its end; `tell` gets its lines of standard error. Cancelling ends it.

    It ends with this process, too, however that ends: standard input is the pipe that `penstock.cli.part`
    watches. Of standard output the last 4 MiB are kept. `environment` is that of this process unless given.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.part", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return CommandOutcome(exit_code=_NOT_STARTED, output="", errors=str(error))
    assert process.stdout is not None
    assert process.stderr is not None
    errors: deque[str] = deque(maxlen=_ERROR_LINES)
    try:
        output, _ = await asyncio.gather(_all_of(process.stdout), _lines(process.stderr, errors, tell))
        code = await process.wait()
    finally:
        if process.returncode is None:
            # What it has started is in its group, and would hold its pipes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return CommandOutcome(exit_code=code, output=output.decode("utf-8", "replace"), errors="\n".join(errors))


async def _all_of(stream: asyncio.StreamReader) -> bytes:
    held = b""
    while piece := await stream.read(1 << 16):
        held = (held + piece)[-_OUTPUT_BYTES_MAX:]
    return held


async def _lines(stream: asyncio.StreamReader, kept: deque[str], tell: Callable[[str], None]) -> None:
    while True:
        try:
            raw = await stream.readline()
        except ValueError:  # a line longer than anybody reads
            continue
        if not raw:
            return
        line = raw.decode("utf-8", "replace").rstrip()
        if line:
            kept.append(line)
            tell(line)
