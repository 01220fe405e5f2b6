"""Worker processes for several rounds. Each prepares its data once and then executes orders."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

__all__ = ["Crew"]

_PATIENCE_S = 300.0


class Crew:
    """A group of `count` fresh processes. An order is a module's function with arguments, run in all of
    them."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def order(self, work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Run `work(*arguments[i])` in process i. All start before any result is awaited."""
        for line, given in zip(self._lines, arguments, strict=True):
            line.send((work, given))
        answers = [self._answer(line) for line in self._lines]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def _answer(self, line: Connection) -> Any:
        if not line.poll(_PATIENCE_S):
            raise TimeoutError("a benchmark process did not answer")
        return line.recv()


def _serve(line: Connection) -> None:
    while True:
        try:
            work, arguments = line.recv()
        except EOFError:
            return
        try:
            line.send(work(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is told to the one who gave the order
            line.send(error)
