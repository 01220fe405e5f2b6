"""Values that describe a running fleet: its parts, their log, and its map."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from penstock.config import Secret


class PartKind(enum.Enum):
    """The kind of a part. The order is that of the data flow, in which parts also stop."""

    COLLECTOR = "collector"
    TOPICS = "topics"
    RELAY = "relay"
    PIPELINE = "pipeline"
    TIMESERIES = "timeseries"
    VECTOR = "vector"
    CONSOLE = "console"


class PartState(enum.Enum):
    """The state of a part.

    `starting`: runs, but has not been ready yet. `ready`: works. `not_ready`: was ready, and is not any more.
    `restarting`: has ended and will be restarted at a known time. `failed`: has ended for a reason that a
    restart does not change; it is retried rarely. `stopping`: was asked to stop. `stopped`: has ended on
    request. `disabled`: does not run.
    """

    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not_ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DISABLED = "disabled"


class Level(enum.IntEnum):
    """The level of a line of the log."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """The status of one part. Unknown values are None, never zero."""

    name: str
    kind: PartKind
    state: PartState
    since_ms: int
    """When the part entered this state."""
    pid: int | None = None
    restarts: int = 0
    """Restarts since the start of the fleet."""
    next_start_ms: int | None = None
    """The time of the next restart, if one is due."""
    last_error: str | None = None
    """Its last line of level error, or why it ended. Kept after a recovery."""
    last_error_ms: int | None = None
    address: str | None = None
    """The address as `host:port`; for the collector, the address of its probes."""
    disabled_why: str | None = None
    """Why the part does not run, and how to enable it."""
    progress: Mapping[str, object] = field(default_factory=dict)
    """The last `progress` event of a pipeline (`penstock run --json`) or a relay (`penstock topics relay
    --events`). Empty while the part does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of the fleet's log. Line numbers are consecutive."""

    number: int
    at_ms: int
    level: Level
    part: str
    """The name of the part; `up` for the fleet itself."""
    text: str


FleetEvent: TypeAlias = PartStatus | LogLine


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """A queue in an object store, with its producers and consumers."""

    name: str
    store: str
    manifest_path: str
    data_path_prefix: str
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Options of the store; others come from the environment."""
    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsPlace:
    """The topics server. Its address is in its `PartStatus`.

    `key` gives the parts of this machine access if the server requires keys.
    """

    part: str
    data_dir: str
    key: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlace:
    """A relay from a topic into a queue; `app` identifies its position in the queue."""

    part: str
    topic: str
    queue: str
    app: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverPlace:
    """A directory of the collector's telemetry buffer, with a `core_<n>` for each core."""

    name: str
    part: str
    path: str
    cores: int = 1
    budget_bytes: int | None = None
    """The limit of its disk space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorPlace:
    """The collector, its Quiver directories, and the queues that its exporters append to."""

    part: str
    quivers: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlace:
    """A pipeline, its file, and its queue if the queue belongs to the fleet."""

    name: str
    part: str
    file: str
    queue: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabasePlace:
    """A database and the queue that feeds it. The address and `key` are as in `TopicsPlace`."""

    name: str
    part: str
    kind: PartKind
    store: str
    queue: str | None = None
    key: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMap:
    """Where the parts of a fleet keep data. It does not change while the fleet runs."""

    data_dir: str
    queues: tuple[QueuePlace, ...] = ()
    topics: TopicsPlace | None = None
    relays: tuple[RelayPlace, ...] = ()
    quivers: tuple[QuiverPlace, ...] = ()
    pipelines: tuple[PipelinePlace, ...] = ()
    databases: tuple[DatabasePlace, ...] = ()

    def collector(self, parts: Iterable[PartStatus]) -> CollectorPlace | None:
        """Return the collector among the parts, or None if it is missing or disabled."""
        for part in parts:
            if part.kind is PartKind.COLLECTOR and part.state is not PartState.DISABLED:
                return CollectorPlace(
                    part=part.name,
                    quivers=tuple(place.name for place in self.quivers),
                    queues=tuple(place.name for place in self.queues if part.name in place.producers),
                )
        return None


class FleetView(Protocol):
    """A read-only view of a fleet, for use in the thread of its event loop."""

    @property
    def map(self) -> FleetMap:
        """The map of the fleet."""
        ...

    def parts(self) -> Sequence[PartStatus]:
        """Return all parts in data-flow order."""
        ...

    def log(self, after: int = 0, limit: int = 200) -> Sequence[LogLine]:
        """Return the last lines after line number `after`, oldest first. Old lines are dropped."""
        ...

    def subscribe(self, listener: Callable[[FleetEvent], None]) -> Callable[[], None]:
        """Call `listener` with every status change and log line. Return a function to unsubscribe.

        The listener is called in the event loop's thread. It must not block or raise.
        """
        ...
