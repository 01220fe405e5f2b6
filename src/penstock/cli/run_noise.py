"""What Java and its Python workers print, for the terminal: without the traces that mean nothing."""

from __future__ import annotations

import os
from typing import Final

from penstock.up import NoiseFilter

__all__ = ["JavaNoise"]

_STANDARD_ERROR: Final = 2


class JavaNoise:
    """Prints every line on standard error as it is, except the noise of Spark's Python daemon."""

    def __init__(self, target: int = _STANDARD_ERROR) -> None:
        self._filter = NoiseFilter()
        self._target = target

    def hear(self, line: str) -> None:
        kept = [text for text, is_noise in self._filter.hear(line) if not is_noise]
        if kept:
            # Not through `sys.stderr`: a thread that holds it when the process ends would abort that process.
            os.write(self._target, "".join(f"{text}\n" for text in kept).encode("utf-8", "replace"))
