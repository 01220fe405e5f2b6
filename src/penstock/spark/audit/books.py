"""The durable state of a pipeline for displays: progress, sinks, commits, dead letters and the audit.

It is read without Spark or Java.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from penstock.errors import Corrupt, PenstockError, Unsupported
from penstock.spark.audit.audit import AuditReport, audit_pipeline
from penstock.spark.audit.inputs import apps_in_ledger, query_of
from penstock.spark.pipeline.checkpoint import Checkpoint
from penstock.spark.pipeline.dead_letters import Letter, LetterPage, LetterReader, Letters, Position
from penstock.spark.pipeline.ledger import BatchLine, Ledger
from penstock.spark.pipeline.outputs import Output, table_of
from penstock.spark.pipeline.redrive import redriven_places
from penstock.spark.pipeline.sink_spec import SinkSpec
from penstock.spark.pipeline.spec import PipelineSpec, load_spec
from penstock.spark.tables.delta_commits import find_commit

_SINKS_KEPT_S: Final = 10.0
_LETTERS_KEPT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkProgress:
    """The progress of a sink."""

    name: str
    kind: str
    place: str
    last: int | None
    """The last micro-batch in the sink. None if there is none or `error` says why it is unknown."""
    error: str | None = None
    is_letters: bool = False
    """Whether this is the dead-letter table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BooksReading:
    """The progress of a pipeline according to its durable state."""

    query: str | None
    """The id of the query, or None if the pipeline has never run."""
    batches: Sequence[BatchLine]
    """The last micro-batches, oldest first."""
    checkpoint: str
    planned: int | None
    """The last planned micro-batch. None if there is none or the checkpoint is not local."""
    done: int | None
    sinks: Sequence[SinkProgress]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCommit:
    """The state of one micro-batch according to a sink's own history."""

    sink: str
    kind: str
    place: str
    has_it: bool | None
    """None if the sink's history does not reach back or could not be read. `text` gives the reason."""
    version: int | None = None
    """The version of a Delta table that the micro-batch wrote."""
    at_ms: int | None = None
    rows: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A pipeline's file, with its ledger and its checkpoint."""

    spec: PipelineSpec
    ledger: Ledger
    checkpoint: Checkpoint


class PipelineBooks:
    """A reader of a pipeline's durable state, given the pipeline's file. Delta tables need the extra `spark`.

    Every call blocks. `audit` may run in one thread while another thread calls the other methods, one at a
    time. The methods raise `PenstockError` if the state cannot be read, and `ConfigError` if the file is
    invalid. The first call reads the file. If that fails, the next call reads it again, since it may have
    been corrected.
    """

    def __init__(self, file: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._file = file
        self._environ = environ
        self._opened: _Opened | None = None
        self._lock = threading.Lock()
        self._sinks: tuple[float, list[SinkProgress]] | None = None
        self._heads: tuple[float, Letters] | None = None
        self._app: str | None = None

    def close(self) -> None:
        """Close the ledger."""
        with self._lock:
            if self._opened is not None:
                self._opened.ledger.close()

    @property
    def _books(self) -> _Opened:
        with self._lock:
            if self._opened is None:
                spec = load_spec(self._file, self._environ)
                self._opened = _Opened(spec, Ledger(spec.ledger_config), Checkpoint(spec.checkpoint_path))
            return self._opened

    @property
    def _spec(self) -> PipelineSpec:
        return self._books.spec

    @property
    def _ledger(self) -> Ledger:
        return self._books.ledger

    @property
    def _checkpoint(self) -> Checkpoint:
        return self._books.checkpoint

    @property
    def _query(self) -> str | None:
        """The id of the pipeline's query, which is constant for the life of its checkpoint."""
        if self._checkpoint.is_local:
            return self._checkpoint.query_id or self._app
        if self._app is None:
            self._app = query_of(self._checkpoint, apps_in_ledger(self._spec))
        return self._app

    def read(self, last: int) -> BooksReading:
        """Return the pipeline's progress with its `last` micro-batches."""
        query = self._query
        lines = [] if query is None else self._ledger.last(query, last)
        is_near = self._checkpoint.is_local
        return BooksReading(
            query=query,
            batches=lines,
            checkpoint=self._spec.checkpoint_path,
            planned=max(self._checkpoint.planned(), default=None) if is_near else None,
            done=max(self._checkpoint.done(), default=None) if is_near else None,
            sinks=self._sinks_now(query),
        )

    def _sinks_now(self, query: str | None) -> list[SinkProgress]:
        now = time.monotonic()
        if self._sinks is None or now - self._sinks[0] > _SINKS_KEPT_S:
            sinks = [_sink(name, sink, query) for name, sink in self._spec.outputs.items()]
            if self._spec.letters is not None:
                sinks.append(_sink("dead letters", self._spec.letters, query, is_letters=True))
            self._sinks = (now, sinks)
        return self._sinks[1]

    def micro_batch(self, number: int) -> BatchLine | None:
        """Return the ledger line of a micro-batch, or None."""
        query = self._query
        return None if query is None else self._ledger.line(query, number)

    def find(self, shard: int, sequence: int) -> BatchLine | None:
        """Return the line of the micro-batch that read a sequence, or None, with a few reads."""
        query = self._query
        return None if query is None else self._ledger.find(query, shard, sequence)

    def commits(self, number: int) -> Sequence[SinkCommit]:
        """Return the state of a micro-batch in each sink."""
        query = self._query
        if query is None:
            return []
        return [_commit(name, sink, query, number) for name, sink in self._spec.outputs.items()]

    def letter(self, shard: int, sequence: int, index: int) -> Letter | None:
        """Return the dead letter at a position, or None."""
        reader = self._letter_reader
        if reader is None:
            return None
        with self._whole_files():
            return reader.find(self._letters(reader), (shard, sequence, index), redriven_places(self._spec))

    def letters(self, after: Position | None, limit: int) -> LetterPage | None:
        """Return a page of dead letters after a position, or None if the pipeline does not keep any."""
        reader = self._letter_reader
        if reader is None:
            return None
        with self._whole_files():
            return reader.page(self._letters(reader), after, limit, redriven_places(self._spec))

    @property
    def _letter_reader(self) -> LetterReader | None:
        table = None if self._spec.letters is None else table_of(self._spec.letters)
        return None if table is None else LetterReader(table, self._spec.name)

    def _letters(self, reader: LetterReader) -> Letters:
        now = time.monotonic()
        if self._heads is None or now - self._heads[0] > _LETTERS_KEPT_S:
            self._heads = (now, reader.heads())
        return self._heads[1]

    @contextlib.contextmanager
    def _whole_files(self) -> Iterator[None]:
        """Raise `Corrupt` if a file of a table cannot be decoded."""
        try:
            yield
        except pa.ArrowException as error:
            why = str(error).partition("\n")[0]
            raise Corrupt(f"a table of {self._spec.name} cannot be read: {why}. Restore it") from error

    def audit(self) -> AuditReport:
        """Audit every sink against queue, checkpoint, ledger and tables."""
        with self._whole_files():
            return audit_pipeline(self._spec)


def _sink(name: str, sink: SinkSpec, query: str | None, *, is_letters: bool = False) -> SinkProgress:
    last = error = None
    try:
        last = None if query is None else Output.of(sink).last_version(query)
    except (PenstockError, OSError) as failure:
        error = str(failure)
    return SinkProgress(
        name=name, kind=sink.kind, place=sink.place, last=last, error=error, is_letters=is_letters
    )


def _commit(name: str, sink: SinkSpec, query: str, number: int) -> SinkCommit:
    """Return the state of a micro-batch in a sink, or the reason why it cannot be read."""
    try:
        if sink.kind == "delta":
            return _delta_commit(name, sink, query, number)
        last = Output.of(sink).last_version(query)
    except (PenstockError, OSError) as error:
        return SinkCommit(sink=name, kind=sink.kind, place=sink.place, has_it=None, text=str(error))
    has_it = last is not None and last >= number
    text = "the sink has this micro-batch" if has_it else "the sink has not reached this micro-batch"
    return SinkCommit(sink=name, kind=sink.kind, place=sink.place, has_it=has_it, text=text)


def _delta_commit(name: str, sink: SinkSpec, query: str, number: int) -> SinkCommit:
    from penstock.spark.tables.delta import load_delta

    spec = table_of(sink)
    if spec is None:
        raise Unsupported(f"{sink.place} is not a table")
    table = load_delta(spec)
    last = None if table is None else table.transaction_version(query)
    if table is None or last is None or last < number:
        text = "the table has not reached this micro-batch"
        return SinkCommit(sink=name, kind=sink.kind, place=sink.place, has_it=False, text=text)
    found = find_commit(spec, query, number, table.version())
    if found is None:
        text = "the table has later micro-batches; this one wrote no rows, or its entry left the log"
        return SinkCommit(sink=name, kind=sink.kind, place=sink.place, has_it=None, text=text)
    return SinkCommit(
        sink=name,
        kind=sink.kind,
        place=sink.place,
        has_it=True,
        version=found.version,
        at_ms=found.at_ms,
        rows=found.rows,
        text=f"version {found.version} of the table",
    )
