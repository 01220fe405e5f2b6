"""What a run has done so far, added up micro-batch by micro-batch. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.spark import BatchLine, PipelineStatus

__all__ = ["Rate", "Totals", "View"]

WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Records since this command started, and what became of them."""

    batches: int = 0
    read: int = 0
    dead: int = 0
    skipped: int = 0
    gaps: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    last: BatchLine | None = None

    def plus(self, line: BatchLine) -> Totals:
        """With one more micro-batch. One that was run again takes the place of its first run."""
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
    """How fast a count rises, over the last seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, now_s: float, count: int) -> float:
        """The rate now, 0 while there is nothing to compare with."""
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (count - before) / (now_s - since_s) if now_s > since_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that a display shows at one moment."""

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
