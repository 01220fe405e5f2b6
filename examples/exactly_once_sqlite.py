"""Exactly once from a Penstock buffer into SQLite.

    python examples/exactly_once_sqlite.py file:///var/penstock events.db

The rows of a batch and its sequence are committed in one transaction, the batch is acknowledged after that
commit, and the next start resumes from the stored sequence. Kill it at any point: nothing is lost, and
nothing is duplicated.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import time
import uuid
from collections.abc import Callable

from penstock.buffer import ConsumedBatch, ConsumerConfig, FencedError
from penstock.buffer.sync import Consumer

POLL_S = 0.1
SCHEMA = """
CREATE TABLE IF NOT EXISTS events (sequence INTEGER NOT NULL, place INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS position (id INTEGER PRIMARY KEY CHECK (id = 0), owner TEXT, sequence INTEGER);
INSERT OR IGNORE INTO position VALUES (0, NULL, NULL);
"""


def open_database(path: str) -> sqlite3.Connection:
    """Return the database, durable at every commit. `with database` ends a transaction that we begin."""
    database = sqlite3.connect(path, isolation_level=None, timeout=60)
    database.execute("PRAGMA synchronous = FULL")
    database.executescript(SCHEMA)
    return database


def claim(database: sqlite3.Connection, owner: str) -> int | None:
    """Take over the database and return its last sequence, which no other consumer can change now."""
    with database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE position SET owner = ?", (owner,))
        (sequence,) = database.execute("SELECT sequence FROM position").fetchone()
    return None if sequence is None else int(sequence)


def store(
    database: sqlite3.Connection, owner: str, batch: ConsumedBatch, step: Callable[[str], None]
) -> None:
    """Store rows and position in one transaction, if the database is still ours.

    A consumer that was superseded between its fetch and its commit does not know that yet; the owner does.
    """
    with database:
        database.execute("BEGIN IMMEDIATE")
        step("in the transaction")
        ours = (batch.sequence, owner)
        if not database.execute("UPDATE position SET sequence = ? WHERE owner = ?", ours).rowcount:
            raise FencedError("another consumer has claimed the database: stop this one")
        step("position written")
        rows = ((batch.sequence, place, body) for place, body in enumerate(batch.entries))
        database.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
        step("rows written")


def consume(
    config: ConsumerConfig, path: str, *, follow: bool, step: Callable[[str], None] = lambda name: None
) -> None:
    """Move queued batches into the database; with `follow`, wait for more. `step` is called at each point."""
    owner = uuid.uuid4().hex
    with contextlib.closing(open_database(path)) as database:
        step("before the claim")
        last_acked = claim(database, owner)
        step("claimed")
        with Consumer.open(config, last_acked) as consumer:
            while True:
                step("before the fetch")
                batch = consumer.next_batch()
                if batch is not None:
                    step("fetched")
                    store(database, owner, batch, step)
                    step("committed")
                    consumer.ack(batch.sequence)
                    step("acknowledged")
                    continue
                consumer.flush()
                step("dequeued")
                if not follow:
                    return
                time.sleep(POLL_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Move a Penstock buffer into SQLite, exactly once.")
    parser.add_argument("store", help="where the buffer is, for example file:///var/penstock")
    parser.add_argument("database", help="the SQLite file")
    parser.add_argument("--once", action="store_true", help="stop when the queue is empty")
    arguments = parser.parse_args()
    consume(ConsumerConfig(store=arguments.store), arguments.database, follow=not arguments.once)
