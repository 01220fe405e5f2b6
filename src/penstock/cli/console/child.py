"""A `penstock` command as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from penstock.server.console.seam import CommandOutcome

__all__ = ["run_penstock"]

_OUTPUT_BYTES_MAX: Final = 4 << 20
_ERROR_LINES: Final = 50
_NOT_STARTED: Final = 127


async def run_penstock(arguments: Sequence[str], tell: Callable[[str], None]) -> CommandOutcome:
    """Run `penstock ARGUMENTS…` to its end; `tell` gets its lines of standard error. Cancelling ends it.

    Of standard output the last 4 MiB are kept.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
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
            with contextlib.suppress(ProcessLookupError):
                process.kill()
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
