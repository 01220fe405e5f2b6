"""The demo's totals: what producers were told, what the table holds, and whether the two agree."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

from penstock.buffer.audit import Severity, audit
from penstock.buffer.inspect import QueueReader
from penstock.cli.demo_journal import Sums
from penstock.cli.demo_run import Live, Plan
from penstock.cli.demo_table import Contents, contents
from penstock.objects import LocalStore

__all__ = ["Balance", "balance_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The books of one run."""

    produced: int
    acknowledged: Sums
    found: Contents
    queue_left: int
    problems: int
    last: Live

    @property
    def balanced(self) -> bool:
        """Every acknowledged record is in the table exactly once, and nothing is left over or damaged."""
        return (
            self.acknowledged == self.found.acknowledged
            and self.found.distinct == self.found.rows
            and self.found.unoffered == 0
            and self.queue_left == 0
            and self.problems == 0
        )

    @property
    def never_durable(self) -> int:
        """Records that their producer still held when it was killed."""
        return self.produced - self.acknowledged.records - self.found.unacknowledged.records

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "balanced": self.balanced,
            "produced": self.produced,
            "acknowledged": asdict(self.acknowledged),
            "stored": asdict(self.found.acknowledged),
            "durable_but_never_acknowledged": asdict(self.found.unacknowledged),
            "in_flight_when_killed": self.never_durable,
            "rows": self.found.rows,
            "distinct_ids": self.found.distinct,
            "duplicates": self.found.rows - self.found.distinct,
            "queue_left": self.queue_left,
            "problems": self.problems,
            "consumer_kills": self.last.consumer_kills,
            "producer_kills": self.last.producer_kills,
            "seconds": round(self.last.elapsed_s, 2),
        }


def balance_of(plan: Plan, last: Live) -> Balance:
    """Close the books on what a finished run left behind."""
    journals = plan.journals()
    queue_left, problems = asyncio.run(_look_at_queue(plan))
    return Balance(
        produced=sum(journal.offered_end for journal in journals.values()),
        acknowledged=sum((journal.acked for journal in journals.values()), Sums()),
        found=contents(plan.database, journals),
        queue_left=queue_left,
        problems=problems,
        last=last,
    )


async def _look_at_queue(plan: Plan) -> tuple[int, int]:
    store = LocalStore(plan.store)
    try:
        reader = QueueReader(store, "ingest/manifest")
        findings = await audit(reader, "ingest", deep=True)
        length = len(await reader.index())
    finally:
        await store.close()
    return length, sum(finding.severity is Severity.PROBLEM for finding in findings)
