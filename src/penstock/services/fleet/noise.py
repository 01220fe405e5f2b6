"""Traces that Spark prints although nothing is wrong, recognised as whole blocks. Pure.

Spark closes the connection to a Python worker that plans a read or a write as soon as it has the answer. The
worker then flushes what is left for nobody, and its daemon prints the `BrokenPipeError` with the two frames
that lead there. An error of the work itself has other frames, and what it does to a query is told by Spark.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.services.fleet.lines import Levels, Said
from penstock.services.fleet.status import Level

__all__ = ["Listener"]

_OPENING: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'^  File ".*[/\\]pyspark[/\\]daemon\.py", line \d+, in (manager|worker)$')
_CODE: Final = re.compile(r"^    \s*(code = worker\(sock, authenticated\)|outfile\.flush\(\)|[\^~]+)$")
_END: Final = re.compile(r"^(BrokenPipeError: \[Errno 32\]|ConnectionResetError: \[Errno 104\]) .*$")


class Listener:
    """Gives each line of standard error a level; a block of that noise is debug, everything else as it is.

    The lines of what may become such a block are held until it has ended, or has become something else.
    """

    def __init__(self) -> None:
        self._levels = Levels()
        self._held: list[str] = []

    def hear(self, line: str) -> list[Said]:
        """What can be said now that this line has come."""
        if not self._held:
            if line == _OPENING:
                self._held.append(line)
                return []
            return [self._levels.of(line)]
        if _FRAME.match(line) or _CODE.match(line):
            self._held.append(line)
            return []
        if _END.match(line) and any(_FRAME.match(one) for one in self._held):
            block, self._held = [*self._held, line], []
            return [Said(Level.DEBUG, one) for one in block]
        return [*self.release(), *self.hear(line)]

    def release(self) -> list[Said]:
        """What was held, as it is: nothing more came."""
        held, self._held = self._held, []
        return [self._levels.of(one) for one in held]
