"""What is known of a running fleet: its parts, their log, and where everything is. Plain values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from penstock.config import Secret


class PartKind(enum.Enum):
    """What a part is, in the direction of the flow: a stop goes down this list."""

    COLLECTOR = "collector"
    TOPICS = "topics"
    RELAY = "relay"
    PIPELINE = "pipeline"
    TIMESERIES = "timeseries"
    VECTOR = "vector"
    CONSOLE = "console"


class PartState(enum.Enum):
    """How a part is.

    `starting`: runs and is not ready for the first time. `ready`: does its work. `not_ready`: runs, was ready
    and says that it is not. `restarting`: has ended and is started again at a moment that is known. `failed`:
    has ended for a reason that starting it again does not change; it is tried again rarely. `stopping`: was
    asked to end. `stopped`: has ended because it was asked to. `disabled`: is not run.
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
    """How much a line of the log matters."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """One part, at one moment. What is not known is None, never a zero."""

    name: str
    kind: PartKind
    state: PartState
    since_ms: int
    """When it came into this state."""
    pid: int | None = None
    restarts: int = 0
    """How often it was started again since the fleet was."""
    next_start_ms: int | None = None
    """When it is started again, if it is waiting for that."""
    last_error: str | None = None
    """Its last line of the level error, or why it ended. Stays after it runs again."""
    last_error_ms: int | None = None
    address: str | None = None
    """Where it listens, `host:port`; of the collector the address of its probes."""
    disabled_why: str | None = None
    """Why it is not run, with what would change that."""
    progress: Mapping[str, object] = field(default_factory=dict)
    """The last figures that it told itself: of a pipeline the event `progress` of `penstock run --json`, of a
    relay that of `penstock topics relay --events`. Empty while it does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of the log of the whole. `number` rises by one from line to line."""

    number: int
    at_ms: int
    level: Level
    part: str
    """Its name; `up` for the fleet itself."""
    text: str


FleetEvent: TypeAlias = PartStatus | LogLine


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """A queue in an object store, and the parts on both sides of it."""

    name: str
    store: str
    manifest_path: str
    data_path_prefix: str
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The store's own settings; what is not in them comes from the environment."""
    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsPlace:
    """The topics server, whose address its `PartStatus` tells.

    `key` opens it for this machine's own parts, when it asks for keys.
    """

    part: str
    data_dir: str
    key: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlace:
    """From a topic into a queue; `app` is the name its position has there."""

    part: str
    topic: str
    queue: str
    app: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverPlace:
    """A directory of the collector's telemetry buffer: below it one `core_<n>` for each core."""

    name: str
    part: str
    path: str
    cores: int = 1
    budget_bytes: int | None = None
    """What it may take of the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorPlace:
    """The collector, its Quiver directories, and the queues that its exporters append to."""

    part: str
    quivers: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlace:
    """A pipeline by its file, and the queue it reads if that is one of the fleet's."""

    name: str
    part: str
    file: str
    queue: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabasePlace:
    """A database and the queue that feeds it. Address and `key` as of `TopicsPlace`."""

    name: str
    part: str
    kind: PartKind
    store: str
    queue: str | None = None
    key: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMap:
    """Where everything of a fleet is. Does not change while it runs."""

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
    """What others may see of a fleet. To be used in the thread of its loop."""

    @property
    def map(self) -> FleetMap:
        """Where everything is."""
        ...

    def parts(self) -> Sequence[PartStatus]:
        """Every part, in the order of the flow."""
        ...

    def log(self, after: int = 0, limit: int = 200) -> Sequence[LogLine]:
        """The last lines of the log after a number, oldest first; older ones are forgotten."""
        ...

    def subscribe(self, listener: Callable[[FleetEvent], None]) -> Callable[[], None]:
        """Call `listener` with every part that changes and every line of the log; returns how to end that.

        It is called in the loop's thread, must return at once and must not raise.
        """
        ...
