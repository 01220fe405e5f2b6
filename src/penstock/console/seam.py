"""What the console asks of whoever runs the parts: which there are, where their data is, what they say.

The console stands on the server's floor. It looks at queues, topics and Quiver by itself, and is given the
rest by its host, `penstock up`: the parts as processes, the books of pipelines, and a way to run a command.
Everything here is called on the console's event loop, except what says that it blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from penstock.objects import StoreConfig

__all__ = [
    "BalanceLine",
    "Books",
    "BooksReading",
    "Change",
    "CollectorPlace",
    "CommandOutcome",
    "DatabasePlace",
    "Host",
    "Letter",
    "LetterPage",
    "LogLine",
    "MicroBatch",
    "Part",
    "PartState",
    "PipelinePlace",
    "Plan",
    "QueuePlace",
    "QuiverPlace",
    "RelayPlace",
    "Sink",
    "SinkCommit",
    "TopicsPlace",
]


class PartState(enum.StrEnum):
    """Where a part is in its life."""

    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not_ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process, as its supervisor sees it."""

    name: str
    kind: str
    """`topics`, `relay`, `collector`, `pipeline`, `timeseries`, `vector` or `console`."""
    state: PartState
    since_ms: int
    pid: int | None = None
    restarts: int = 0
    last_error: str | None = None
    address: str | None = None
    """`http://host:port`, where it has one and it is known."""
    disabled_why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of the one log stream."""

    at_ms: int
    part: str
    level: str
    """`debug`, `info`, `warning` or `error`."""
    text: str


Change: TypeAlias = Part | LogLine
"""A part as it is now, or a line that was logged."""


# Where things are. Names are what the console's paths and answers say; nothing else is ever opened.


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsPlace:
    """The topics server. `url` is None while it has no address."""

    part: str
    url: str | None
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """A queue of the buffer, sharded or not."""

    name: str
    store: StoreConfig
    manifest_path: str
    data_path_prefix: str
    """The folder of its batches, as producers have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlace:
    """A relay from a topic into a queue of the plan. `app` is the name its position is kept under."""

    part: str
    topic: str
    queue: str
    app: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverPlace:
    """A data directory of Quiver on this machine."""

    name: str
    part: str
    path: str
    """The directory with `core_0` in it."""
    budget_bytes: int | None = None
    """What it may take of the disk, if the file says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorPlace:
    """The collector: which Quiver directories it keeps, and which queues its exporters append to."""

    part: str
    admin_url: str | None
    """Of its `/metrics`; None while it is not known."""
    quivers: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlace:
    """A pipeline: its file, the queue it reads (a name of the plan, if it is there), and its books."""

    name: str
    part: str
    file: str
    queue: str | None
    books: Books


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabasePlace:
    """A database behind HTTP, and the queue that feeds it."""

    name: str
    kind: str
    """`timeseries` or `vector`."""
    part: str
    url: str | None
    key: str | None = field(default=None, repr=False)
    queue: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything the console may look at. Parts that are switched off have no place here."""

    topics: TopicsPlace | None = None
    queues: tuple[QueuePlace, ...] = ()
    relays: tuple[RelayPlace, ...] = ()
    collector: CollectorPlace | None = None
    quivers: tuple[QuiverPlace, ...] = ()
    pipelines: tuple[PipelinePlace, ...] = ()
    databases: tuple[DatabasePlace, ...] = ()


# The books of a pipeline, which a floor that knows Spark reads.


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A line of the ledger. Offsets are the first sequence that is not read, per shard."""

    number: int
    at_ms: int
    start: Mapping[int, int]
    end: Mapping[int, int]
    records: int
    dead: int
    skipped: int
    rows: Mapping[str, int]
    took_ms: int | None = None
    """How long it took, from its beginning until every sink had it, if that is known."""


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
    batches: Sequence[MicroBatch]
    """The last ones, oldest first."""
    checkpoint: str
    planned: int | None
    """The last micro-batch that the checkpoint has a plan for; None if there is none or it is elsewhere."""
    done: int | None
    sinks: Sequence[Sink]


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceLine:
    """The account of one sink: produced = delivered + dead + dropped + skipped + in flight."""

    sink: str
    produced: int
    delivered: int
    dead: int
    dropped: int | None
    """None where rows and records do not correspond one to one; then the account cannot be closed."""
    skipped: int
    in_flight: int
    balances: bool
    """Whether nothing is wrong by the audit."""
    findings: tuple[str, ...] = ()


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


class Books(Protocol):
    """Reads the durable books of one pipeline. Every call blocks, and is made in a thread.

    `audit` may run in one thread while the others are called, one at a time, in another. Raises
    `PenstockError` where a book cannot be read.
    """

    def read(self, last: int) -> BooksReading:
        """How far it is, with its `last` micro-batches."""
        ...

    def micro_batch(self, number: int) -> MicroBatch | None:
        """The line of a micro-batch."""
        ...

    def find(self, shard: int, sequence: int) -> MicroBatch | None:
        """The line of the micro-batch that read this sequence; a few reads, however many lines there are."""
        ...

    def commits(self, number: int) -> Sequence[SinkCommit]:
        """What each sink says of a micro-batch."""
        ...

    def letter(self, shard: int, sequence: int, index: int) -> Letter | None:
        """The dead letter at a position."""
        ...

    def letters(self, after: tuple[int, int, int] | None, limit: int) -> LetterPage | None:
        """Dead letters behind a position; None if the pipeline keeps none."""
        ...

    def audit(self) -> Sequence[BalanceLine]:
        """The account of every sink, from queue, checkpoint, ledger and tables."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """How a command ended."""

    exit_code: int
    output: str
    """What it printed to standard output."""
    errors: str
    """The end of what it printed to standard error."""


class Host(Protocol):
    """Whoever runs the parts. Everything is called on the console's event loop and answers at once."""

    def parts(self) -> Sequence[Part]:
        """Every part now, in the direction of the flow."""
        ...

    def plan(self) -> Plan:
        """Where everything is now. Addresses change when a part is started again."""
        ...

    def log(self) -> Sequence[LogLine]:
        """The last lines of the log, oldest first; a few hundred are enough."""
        ...

    def subscribe(self, tell: Callable[[Change], None]) -> Callable[[], None]:
        """Have `tell` called, on the console's loop, for every change of a part and every line from now on.

        Returns what ends it.
        """
        ...

    def run(self, arguments: Sequence[str], tell: Callable[[str], None]) -> Awaitable[CommandOutcome]:
        """Run `penstock ARGUMENTS…` as a child process; `tell` gets its lines of standard error as they come.

        A child that cannot be started is an outcome with exit code 127. Cancelling ends the child.
        """
        ...
