"""What the demo prints in the end: the totals, the audit, and where to look next."""

from __future__ import annotations

import shlex
import subprocess
import sys

import click
import msgspec

from penstock.cli.demo_balance import Balance, Records, close_books
from penstock.cli.demo_clicks import COLUMNS, rebuild
from penstock.cli.demo_journal import Sums
from penstock.cli.demo_plan import ROWS, TOTALS, Plan
from penstock.cli.demo_processes import DemoFailed
from penstock.cli.demo_run import Outcome
from penstock.cli.display import print_pairs, print_table
from penstock.units import format_duration, format_size

__all__ = ["audit_json", "print_audit", "print_next", "print_totals", "read_books"]


def read_books(plan: Plan) -> Balance:
    """The tables against the journals. Raises `DemoFailed` when there is no table."""
    import pyarrow.compute as pc

    from penstock.spark import load_delta, load_spec, read_letters, table_of

    spec = load_spec(plan.pipeline_file)
    tables = {name: table_of(sink) for name, sink in spec.outputs.items()}
    rows, totals = (load_delta(table) for name in (ROWS, TOTALS) if (table := tables[name]) is not None)
    letters = table_of(spec.letters) if spec.letters is not None else None
    if rows is None or totals is None or letters is None:
        raise DemoFailed(f"there is no table {ROWS} or no table {TOTALS}, though everything is delivered")
    events = rebuild(rows.to_pyarrow_dataset().to_table(columns=list(COLUMNS)))
    clicks = totals.to_pyarrow_dataset().to_table(columns=["clicks"]).column("clicks")
    dead = read_letters(letters, ["value"]).column("value")
    return close_books(
        plan.journals(), Records.of(events), Records.of(dead), int(pc.sum(clicks).as_py() or 0)
    )


def print_totals(balance: Balance, outcome: Outcome) -> None:
    rows = [
        ("acknowledged to producers", *_cells(balance.acknowledged)),
        ("of these, in the tables", *_cells(balance.stored)),
    ]
    print_table(("", "events", "bytes", "checksum"), rows, right=(1, 2, 3))
    lacking = balance.acknowledged.records - balance.stored.records
    wrong = (
        f"{max(0, lacking):,} missing, {balance.duplicates:,} twice, {balance.foreign:,} from nowhere, "
        f"{balance.misplaced:,} in the wrong table"
    )
    print_pairs(
        [
            ("stored", f"{balance.rows:,} rows, {balance.letters:,} dead letters: {wrong}"),
            ("totals", f"{TOTALS} adds up to {balance.clicks:,} clicks, for {balance.rows:,} rows"),
            ("killed", _driver_kill(outcome)),
            ("killed", _producer_kill(balance, outcome)),
            ("time", _speed(balance, outcome)),
        ]
    )


def _cells(sums: Sums) -> tuple[str, str, str]:
    return f"{sums.records:,}", f"{sums.size_bytes:,}", f"{sums.checksum:016x}"


def _driver_kill(outcome: Outcome) -> str:
    if not outcome.interrupted:
        return "the Spark driver, between two micro-batches"
    moment = "when its rows were stored and its totals were not" if outcome.half_stored else "in the middle"
    return f"the Spark driver in micro-batch {outcome.interrupted[0]}, {moment}; it was run again"


def _producer_kill(balance: Balance, outcome: Outcome) -> str:
    if not outcome.last.producer_kills:
        return "no producer: it had ended before"
    return (
        f"a producer with {balance.never_durable + balance.unacknowledged:,} events not acknowledged yet: "
        f"{balance.unacknowledged:,} of them are stored, {balance.never_durable:,} are not; either is right"
    )


def _speed(balance: Balance, outcome: Outcome) -> str:
    size = format_size(balance.acknowledged.size_bytes)
    return f"{size} in {format_duration(outcome.last.elapsed_s)}, with two starts of Spark"


def _command(plan: Plan, *options: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli", "audit", str(plan.pipeline_file), "--deep", *options]


def print_audit(plan: Plan) -> bool:
    """`penstock audit --deep` as people run it; true when it balances."""
    click.echo(click.style(f"$ penstock audit {shlex.quote(str(plan.pipeline_file))} --deep", bold=True))
    return subprocess.run(_command(plan), check=False).returncode == 0


def audit_json(plan: Plan) -> dict[str, object]:
    """The same for programs. Raises `DemoFailed` when it has no answer."""
    run = subprocess.run(_command(plan, "--json"), stdout=subprocess.PIPE, check=False)
    try:
        return msgspec.json.decode(run.stdout, type=dict[str, object])
    except msgspec.DecodeError:
        code = run.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise DemoFailed(f"the audit {how} and gave no answer") from None


def print_next(plan: Plan, *, kept: bool) -> None:
    """Commands to go on with; for a run that leaves nothing, those of one that would."""
    if kept:
        file, queue, table = str(plan.pipeline_file), plan.queue, plan.table(TOTALS)
    else:
        file, queue, table = "demo/clicks.yaml", "demo/queue", f"demo/tables/{TOTALS}"
    script = f"from deltalake import DeltaTable; print(DeltaTable({table!r}).to_pandas())"
    steps = [
        ("check it again", f"penstock audit {shlex.quote(file)} --deep"),
        ("run it further", f"penstock run {shlex.quote(file)}"),
        ("see the queue", f"penstock buffer stat {shlex.quote(queue)}"),
        ("read a table", f'python -c "{script}"'),
        ("read on", "docs/README.md: pipelines, formats, what is promised and how it is tested"),
    ]
    if not kept:
        steps.insert(0, ("keep the files", "penstock demo --keep --data demo, then:"))
    print_pairs(steps, "Where to look next")
