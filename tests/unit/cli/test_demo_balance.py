from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from penstock.buffer import ProducerConfig
from penstock.buffer.sync import Producer
from penstock.cli.demo_balance import Balance, balance_of
from penstock.cli.demo_journal import JournalWriter, Sums
from penstock.cli.demo_run import Live, Plan
from penstock.cli.demo_table import Table
from penstock.cli.demo_worker import record

DONE = Live(
    phase="done",
    elapsed_s=1.0,
    produced=4,
    durable=4,
    consumed=4,
    queue_length=0,
    consumer_kills=0,
    producer_kills=0,
)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A finished run of four records, with its books in order."""
    plan = Plan(folder=tmp_path, seconds=1.0, producers=1, rate=1.0, records=None)
    records = [record(0, number) for number in range(4)]
    journal = JournalWriter(plan.journal(0))
    journal.offer(0, 4)
    journal.ack(0, Sums.of(records))
    journal.close()
    table = Table(plan.database)
    table.store(0, records)
    table.close()
    return plan


def balance_after(plan: Plan, statement: str) -> Balance:
    with sqlite3.connect(plan.database) as connection:
        connection.execute(statement)
    connection.close()
    return balance_of(plan, DONE)


def test_books_in_order_balance(plan: Plan) -> None:
    balance = balance_of(plan, DONE)
    assert balance.balanced
    assert balance.never_durable == 0


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM records WHERE number = 2",
        "INSERT INTO records SELECT * FROM records WHERE number = 2",
        "UPDATE records SET checksum = checksum + 1 WHERE number = 2",
        "UPDATE records SET size = size + 1 WHERE number = 2",
        "UPDATE records SET number = 3 WHERE number = 2",
        "INSERT INTO records VALUES (9, 0, 1, 1)",
    ],
    ids=["lost", "twice", "changed", "longer", "swapped", "invented"],
)
def test_a_record_that_is_lost_doubled_changed_or_invented_does_not_balance(
    plan: Plan, statement: str
) -> None:
    assert not balance_after(plan, statement).balanced


def test_a_queue_that_is_not_empty_does_not_balance(plan: Plan) -> None:
    with Producer(ProducerConfig(store=str(plan.store))) as producer:
        producer.produce([b"left"]).await_durable()
    assert not balance_of(plan, DONE).balanced
