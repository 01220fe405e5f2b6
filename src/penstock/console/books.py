"""The books of a pipeline for the console: read from durable state alone, without Spark or Java."""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import Corrupt, PenstockError, Unsupported

if TYPE_CHECKING:
    from penstock.spark import AuditReport, BatchLine, Checkpoint, Ledger, PipelineSpec, SinkSpec

_SINKS_KEPT_S: Final = 10.0
_LETTERS_KEPT_S: Final = 5.0
_POSITION: Final = ("shard", "sequence", "index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Where rows go, and how far it has them."""

    name: str
    kind: str
    place: str
    last: int | None
    """The last micro-batch it has; None if it has none, or if `error` says why it is not known."""
    error: str | None = None
    is_letters: bool = False
    """Whether it is the table of dead letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BooksReading:
    """How far a pipeline is, by its durable books."""

    query: str | None
    """None: it never ran."""
    batches: Sequence[BatchLine]
    """The last ones, oldest first."""
    checkpoint: str
    planned: int | None
    """The last micro-batch that the checkpoint has a plan for; None if there is none or it is elsewhere."""
    done: int | None
    sinks: Sequence[Sink]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter with its bytes."""

    shard: int
    sequence: int
    index: int
    """Its place in the batch; -1 for a hole in the queue."""
    reason: str
    at_ms: int
    value: bytes | None
    redriven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterPage:
    """Letters in the order of their positions. `following` is where the next page begins, if there is one."""

    letters: Sequence[Letter]
    following: tuple[int, int, int] | None
    total: int
    left: int
    """Of `total`, not redriven yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCommit:
    """What a sink says of one micro-batch."""

    sink: str
    kind: str
    place: str
    has_it: bool | None
    """None: the sink's own history does not reach back, or could not be read; `text` says which."""
    version: int | None = None
    """The version of the table (Delta, Iceberg snapshot) that it made."""
    at_ms: int | None = None
    rows: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the file of a pipeline leads to."""

    spec: PipelineSpec
    ledger: Ledger
    checkpoint: Checkpoint


class PipelineBooks:
    """Reads the durable books of the pipeline in a file, which needs the extra `spark`.

    Every call blocks, and is made in a thread: `audit` may run in one thread while the others are called, one
    at a time, in another. Raises `PenstockError` where a book cannot be read, and `ConfigError` for a file
    that is wrong. The file is read by the first call, and again as long as that fails: it may be corrected.
    """

    def __init__(self, file: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._file = file
        self._environ = environ
        self._opened: _Opened | None = None
        self._lock = threading.Lock()
        self._sinks: tuple[float, list[Sink]] | None = None
        self._heads: tuple[float, pa.Table] | None = None
        self._app: str | None = None

    def close(self) -> None:
        """Close what was opened."""
        with self._lock:
            if self._opened is not None:
                self._opened.ledger.close()

    @property
    def _books(self) -> _Opened:
        with self._lock:
            if self._opened is None:
                from penstock.spark import Checkpoint, Ledger, load_spec

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
        """The pipeline's query, which stays the same for the life of its checkpoint."""
        from penstock.spark import apps_in_ledger, query_of

        if self._checkpoint.is_local:
            return self._checkpoint.query_id or self._app
        if self._app is None:
            self._app = query_of(self._checkpoint, apps_in_ledger(self._spec))
        return self._app

    def read(self, last: int) -> BooksReading:
        """How far it is, with its `last` micro-batches."""
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

    def _sinks_now(self, query: str | None) -> list[Sink]:
        now = time.monotonic()
        if self._sinks is None or now - self._sinks[0] > _SINKS_KEPT_S:
            sinks = [_sink(name, sink, query) for name, sink in self._spec.outputs.items()]
            if self._spec.letters is not None:
                sinks.append(_sink("dead letters", self._spec.letters, query, is_letters=True))
            self._sinks = (now, sinks)
        return self._sinks[1]

    def micro_batch(self, number: int) -> BatchLine | None:
        """The line of a micro-batch."""
        query = self._query
        return None if query is None else self._ledger.line(query, number)

    def find(self, shard: int, sequence: int) -> BatchLine | None:
        """The line of the micro-batch that read this sequence; a few reads, however many lines there are."""
        query = self._query
        return None if query is None else self._ledger.find(query, shard, sequence)

    def commits(self, number: int) -> Sequence[SinkCommit]:
        """What each sink says of a micro-batch."""
        query = self._query
        if query is None:
            return []
        return [_commit(name, sink, query, number) for name, sink in self._spec.outputs.items()]

    def letter(self, shard: int, sequence: int, index: int) -> Letter | None:
        """The dead letter at a position."""
        if self._spec.letters is None:
            return None
        with self._whole_files():
            heads = self._letters()
            found = heads.filter(
                (pc.field("shard") == shard)
                & (pc.field("sequence") == sequence)
                & (pc.field("index") == index)
            )
            letters = self._with_bytes(found)
        return letters[0] if letters else None

    @contextlib.contextmanager
    def _whole_files(self) -> Iterator[None]:
        """Raises `Corrupt` for a file of a table that is none."""
        try:
            yield
        except pa.ArrowException as error:
            why = str(error).partition("\n")[0]
            raise Corrupt(f"a table of {self._spec.name} cannot be read: {why}. Restore it") from error

    def letters(self, after: tuple[int, int, int] | None, limit: int) -> LetterPage | None:
        """Dead letters after a position; None if the pipeline keeps none."""
        if self._spec.letters is None:
            return None
        with self._whole_files():
            heads = self._letters()
            places = list(zip(*(heads[name].to_pylist() for name in _POSITION), strict=True))
            start = 0 if after is None else bisect.bisect_right(places, after)
            letters = self._with_bytes(heads.slice(start, limit))
        taken = self._taken()
        left = sum(place[2] >= 0 and place not in taken for place in places)
        more = start + limit < len(places)
        return LetterPage(
            letters=letters,
            following=places[start + limit - 1] if more else None,
            total=len(places),
            left=left,
        )

    def _letters(self) -> pa.Table:
        """All letters of this pipeline without their bytes, in the order of their positions, each once."""
        from penstock.spark import HEADS, read_letters, table_of

        now = time.monotonic()
        if self._heads is None or now - self._heads[0] > _LETTERS_KEPT_S:
            assert self._spec.letters is not None
            table = table_of(self._spec.letters)
            assert table is not None
            heads = read_letters(table, HEADS)
            if heads.num_rows:
                heads = heads.filter(pc.field("pipeline") == self._spec.name)
                heads = heads.sort_by([(name, "ascending") for name in _POSITION])
            self._heads = (now, heads)
        return self._heads[1]

    def _with_bytes(self, heads: pa.Table) -> list[Letter]:
        from penstock.spark import read_letters, table_of

        if not heads.num_rows:
            return []
        assert self._spec.letters is not None
        table = table_of(self._spec.letters)
        assert table is not None
        within = (pc.min(heads["sequence"]).as_py(), pc.max(heads["sequence"]).as_py())
        bodies = read_letters(table, ("pipeline", *_POSITION, "value"), within)
        values = {
            (row["shard"], row["sequence"], row["index"]): row["value"]
            for row in bodies.to_pylist()
            if row["pipeline"] == self._spec.name
        }
        taken = self._taken()
        return [
            Letter(
                shard=row["shard"],
                sequence=row["sequence"],
                index=row["index"],
                reason=row["reason"] or "",
                at_ms=int(row["at"].timestamp() * 1000),
                value=values.get((row["shard"], row["sequence"], row["index"])),
                redriven=(row["shard"], row["sequence"], row["index"]) in taken,
            )
            for row in heads.to_pylist()
        ]

    def _taken(self) -> set[tuple[int, int, int]]:
        from penstock.spark import redriven_places

        return redriven_places(self._spec)

    def audit(self) -> AuditReport:
        """The account of every sink, from queue, checkpoint, ledger and tables."""
        from penstock.spark import audit_pipeline

        with self._whole_files():
            return audit_pipeline(self._spec)


def _sink(name: str, sink: SinkSpec, query: str | None, *, is_letters: bool = False) -> Sink:
    from penstock.spark import last_version_of

    last = error = None
    try:
        last = None if query is None else last_version_of(sink, query)
    except (PenstockError, OSError) as failure:
        error = str(failure)
    return Sink(name=name, kind=sink.kind, place=sink.place, last=last, error=error, is_letters=is_letters)


def _commit(name: str, sink: SinkSpec, query: str, number: int) -> SinkCommit:
    """What a sink says of a micro-batch; one that cannot be read says why."""
    from penstock.spark import last_version_of

    try:
        if sink.kind == "delta":
            return _delta_commit(name, sink, query, number)
        last = last_version_of(sink, query)
    except (PenstockError, OSError) as error:
        return SinkCommit(sink=name, kind=sink.kind, place=sink.place, has_it=None, text=str(error))
    has_it = last is not None and last >= number
    text = "the sink has this micro-batch" if has_it else "the sink has not got this far"
    return SinkCommit(sink=name, kind=sink.kind, place=sink.place, has_it=has_it, text=text)


def _delta_commit(name: str, sink: SinkSpec, query: str, number: int) -> SinkCommit:
    from penstock.spark import find_commit, load_delta, table_of

    spec = table_of(sink)
    if spec is None:
        raise Unsupported(f"{sink.place} is no table")
    table = load_delta(spec)
    last = None if table is None else table.transaction_version(query)
    if table is None or last is None or last < number:
        text = "the table has not got this far"
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
