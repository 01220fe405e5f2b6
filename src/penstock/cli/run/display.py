"""Displays of a running pipeline: text on standard error for people, JSON on standard output for programs."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import click
import msgspec

from penstock.cli.output import time_text
from penstock.clock import SYSTEM_CLOCK
from penstock.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    from penstock.spark import BatchLine, PipelineStatus


WINDOW_S = 10.0
LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The number of records since the start of this command."""

    batches: int = 0
    read: int = 0
    dead: int = 0
    skipped: int = 0
    gaps: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    last: BatchLine | None = None

    def plus(self, line: BatchLine) -> Totals:
        """Return the totals with one more micro-batch. A repeated micro-batch replaces its first run."""
        again = self.last if self.last is not None and self.last.batch == line.batch else None
        rows = dict(self.rows)
        for name, count in line.rows.items():
            rows[name] = rows.get(name, 0) + count - (again.rows.get(name, 0) if again else 0)
        return Totals(
            batches=self.batches + (0 if again else 1),
            read=self.read + line.read - (again.read if again else 0),
            dead=self.dead + line.dead - (again.dead if again else 0),
            skipped=self.skipped + line.skipped - (again.skipped if again else 0),
            gaps=self.gaps + line.gaps - (again.gaps if again else 0),
            rows=rows,
            last=line,
        )

    def to_json(self) -> dict[str, object]:
        return {
            "batches": self.batches,
            "read": self.read,
            "rows": dict(self.rows),
            "dead": self.dead,
            "skipped": self.skipped,
            "gaps": self.gaps,
        }


class Rate:
    """The rate of a count over the last few seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, now_s: float, count: int) -> float:
        """Return the current rate, or 0 before there are two values."""
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (count - before) / (now_s - since_s) if now_s > since_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state shown by a display."""

    name: str
    phase: str
    elapsed_s: float
    totals: Totals = Totals()
    rows_per_s: float = 0.0
    status: PipelineStatus | None = None
    restarts: int = 0
    last_error: str | None = None

    def to_json(self) -> dict[str, object]:
        status = self.status
        return {
            "phase": self.phase,
            "batch": self.totals.last.batch if self.totals.last else None,
            "batch_s": status.batch_s if status else None,
            "rows_per_s": round(self.rows_per_s, 1),
            "backlog_batches": status.backlog_batches if status else None,
            "lag_s": round(status.lag_s, 3) if status and status.lag_s is not None else None,
            **self.totals.to_json(),
            "restarts": self.restarts,
            "last_error": self.last_error,
        }


class Display(Protocol):
    """A display of a run: a context manager, used from one thread."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, view: View) -> None:
        """Show the state. Cheap to call often."""
        ...

    def batch(self, done: BatchLine) -> None:
        """Show a finished micro-batch."""
        ...

    def say(self, event: str, sentence: str, view: View) -> None:
        """Report an event, with a sentence for people.

        Displays for people omit `failed`: the command reports the error itself when it ends.
        """
        ...


def choose_display(as_json: bool) -> Display:
    if as_json:
        return JsonLines()
    return Screen() if sys.stderr.isatty() else PlainLines()


def panel(view: View) -> str:
    """Format the state, one figure per line."""
    totals, status = view.totals, view.status
    rows = [
        f"{view.name}: {view.phase}, {format_duration(view.elapsed_s)}",
        f"  micro-batch {_batch(view)}",
        f"  speed       {view.rows_per_s:>12,.0f} records/s",
        f"  backlog     {_number(status.backlog_batches if status else None):>12} batches",
        f"  lag         {_lag(status.lag_s if status else None):>12}",
        f"  read        {totals.read:>12,} records",
    ]
    rows += [f"  {name:<11} {count:>12,} rows" for name, count in totals.rows.items()]
    rows += [f"  {name:<11} {count:>12,}" for name, count in _exceptions(view)]
    if view.last_error:
        rows.append(f"  last error  {view.last_error}")
    return "\n".join(rows)


def line(view: View) -> str:
    """Format the state as one line, for logs."""
    status, totals = view.status, view.totals
    parts = [
        f"{view.phase}, micro-batch {_batch(view)}",
        f"{view.rows_per_s:,.0f} records/s",
        f"backlog {_number(status.backlog_batches if status else None)} batches",
        f"lag {_lag(status.lag_s if status else None)}",
        f"read {totals.read:,}",
        *(f"{name} {count:,}" for name, count in totals.rows.items()),
        *(f"{name} {count:,}" for name, count in _exceptions(view) if count),
    ]
    if view.last_error:
        parts.append(f"last error: {view.last_error}")
    return "   ".join(parts)


def _exceptions(view: View) -> list[tuple[str, int]]:
    counts = {
        "dead": view.totals.dead,
        "skipped": view.totals.skipped,
        "gaps": view.totals.gaps,
        "restarts": view.restarts,
    }
    return [(name, count) for name, count in counts.items() if count or name == "dead"]


def _batch(view: View) -> str:
    if view.totals.last is None:
        return "-"
    took_s = view.status.batch_s if view.status else None
    number = str(view.totals.last.batch)
    return number if took_s is None else f"{number} in {format_duration(took_s)}"


def _number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _lag(lag_s: float | None) -> str:
    return "-" if lag_s is None else f"{lag_s:,.1f}s"


def batch_event(done: BatchLine) -> dict[str, object]:
    """Return a finished micro-batch as a JSON object."""
    return {
        "batch": done.batch,
        "start": {str(shard): place for shard, place in done.start.items()},
        "end": {str(shard): place for shard, place in done.end.items()},
        "read": done.read,
        "rows": done.rows,
        "dropped": {name: done.dropped(name) for name in done.rows},
        "dead": done.dead,
        "skipped": done.skipped,
        "gaps": done.gaps,
        "at": time_text(done.at_ms),
    }


class _Shown:
    """The base class of the displays."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: there is nothing to clean up."""

    def batch(self, done: BatchLine) -> None:
        """Show nothing: people see the totals."""


class JsonLines(_Shown):
    """Prints each event as a JSON object on its own line, and flushes it."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def __enter__(self) -> JsonLines:
        return self

    def show(self, view: View) -> None:
        if time.monotonic() - self._shown >= LINE_EVERY_S:
            self._shown = time.monotonic()
            self._print("progress", view.to_json())

    def batch(self, done: BatchLine) -> None:
        self._print("batch", batch_event(done))

    def say(self, event: str, sentence: str, view: View) -> None:
        self._print(event, {"pipeline": view.name, "message": sentence, **view.to_json()})

    def _print(self, event: str, fields: dict[str, object]) -> None:
        document = {"event": event, "time": time_text(SYSTEM_CLOCK.now_ms()), **fields}
        click.echo(msgspec.json.encode(document).decode())


class PlainLines(_Shown):
    """Prints a line at intervals, for output without a terminal."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def __enter__(self) -> PlainLines:
        return self

    def show(self, view: View) -> None:
        if time.monotonic() - self._shown >= LINE_EVERY_S:
            self._shown = time.monotonic()
            click.echo(line(view), err=True)

    def say(self, event: str, sentence: str, view: View) -> None:
        if event != "failed":
            click.echo(sentence, err=True)


class Screen(_Shown):
    """Shows the current state on a terminal; events scroll above it."""

    def __init__(self) -> None:
        self._console: Console | None = None
        self._live: Live | None = None
        self._spinner: Spinner | None = None

    def __enter__(self) -> Screen:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self._console = Console(stderr=True)
        self._spinner = Spinner("dots", "")
        self._live = Live(self._spinner, console=self._console, refresh_per_second=8, transient=True)
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, view: View) -> None:
        from rich.text import Text

        assert self._spinner is not None
        self._spinner.update(text=Text(panel(view)))

    def say(self, event: str, sentence: str, view: View) -> None:
        from rich.text import Text

        assert self._console is not None
        if event != "failed":
            self._console.print(Text(sentence))
        self.show(view)
