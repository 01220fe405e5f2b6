"""The file of `penstock up`: which parts run on this machine, and where each keeps its data.

A part runs if its key is in the file. Missing keys have the defaults given here. Relative paths are relative
to the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from penstock.config import Secret, Setting, build, faults
from penstock.errors import ConfigError
from penstock.topics import is_topic_name
from penstock.units import DurationLike, convert_units, seconds_of

_PORT_MAX: Final = 65535
_START: Final = re.compile(r"earliest|latest|[0-9]+")
_FIELD: Final = re.compile(r".+:(string|int64|float64|bool|text)(:indexed)?")
_DEFAULTED: Final = ("topics", "collector", "timeseries", "vector", "console")
"""Parts that run with their defaults if their key has no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """A queue that is not at the default location."""

    store: str = ""
    """The address of its store; by default `queues` in the data directory. Credentials come from the
    environment."""
    manifest_path: str = ""
    """By default NAME/manifest."""
    data_path_prefix: str = ""
    """By default NAME."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsPart:
    """The topics server. Its other settings are the `TOPICS_*` environment variables."""

    enabled: bool = True
    host: str | None = None
    port: int = 4000
    data_dir: str = ""
    """By default `topics` in the data directory."""
    keys: Secret | None = None
    """`key[:scopes[:prefixes]],…`; overrides TOPICS_API_KEYS."""

    def __post_init__(self) -> None:
        _check_ports(port=self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPart:
    """A relay that copies each record of a topic into a queue exactly once."""

    topic: str
    queue: str
    name: str = ""
    """The name of the part; by default the topic's."""
    app: str = ""
    """The name under which the queue stores its position; by default relay:TOPIC."""
    value: Literal["record", "data"] = "record"
    on_gap: Literal["fail", "skip", "record"] = "fail"
    after: str = "earliest"
    flush_interval: DurationLike = "100ms"
    create: bool = True
    """Create the topic if it does not exist."""

    def __post_init__(self) -> None:
        if not is_topic_name(self.topic):
            raise ConfigError(
                "topic: start with a letter or digit, then letters, digits, '.', '_', ':' or '-', "
                f"255 characters at most, found {self.topic[:80]!r}"
            )
        if not _START.fullmatch(self.after):
            raise ConfigError(f"after: expected earliest, latest or a sequence, found {self.after[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorPart:
    """The collector: configured by `file`, by `config` (a mapping with the same keys), or by default.

    The default collector buffers data in the data directory and exports each signal to its own queue:
    `metrics`, `traces` and `logs`.
    """

    enabled: bool = True
    file: str | None = None
    config: Mapping[str, object] | None = None
    host: str | None = None
    grpc_port: int = 4317
    http_port: int = 4318
    admin_port: int = 9464
    store: str = ""
    """The store of its queues; by default `queues` in the data directory."""
    tokens: tuple[Secret, ...] = ()
    """If set, each request needs one of these as `Authorization: Bearer …`."""

    def __post_init__(self) -> None:
        if self.file is not None and self.config is not None:
            raise ConfigError("give file or config, not both")
        _check_ports(grpc_port=self.grpc_port, http_port=self.http_port, admin_port=self.admin_port)

    @property
    def is_default(self) -> bool:
        """Whether `penstock up` writes its file from the other keys."""
        return self.file is None and self.config is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePart:
    """A Spark pipeline."""

    file: str
    name: str = ""
    """The name of the part; by default the file's name without its extension."""
    master: str | None = None
    remote: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.master is not None and self.remote is not None:
            raise ConfigError("give master or remote, not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesPart:
    """The time-series database."""

    enabled: bool = True
    host: str | None = None
    port: int = 9090
    store: str = ""
    """By default `timeseries` in the data directory."""
    queue: str | None = None
    """The queue from which it reads OTLP metrics."""
    retention: DurationLike | None = None
    config: str | None = None
    """A file with more settings of the database."""
    keys: Secret | None = None

    def __post_init__(self) -> None:
        _check_ports(port=self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorPart:
    """The vector database."""

    enabled: bool = True
    host: str | None = None
    port: int = 8080
    store: str = ""
    """By default `vector` in the data directory."""
    queue: str | None = None
    """The queue from which it reads vectors."""
    dimensions: int | None = None
    metric: Literal["l2", "cosine", "dot"] | None = None
    fields: tuple[str, ...] = ()
    """NAME:TYPE[:indexed], as for `penstock vector serve --field`."""
    config: str | None = None
    keys: Secret | None = None

    def __post_init__(self) -> None:
        _check_ports(port=self.port)
        for text in self.fields:
            if not _FIELD.fullmatch(text):
                raise ConfigError(f"fields: write NAME:TYPE or NAME:TYPE:indexed, found {text[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolePart:
    """The console, and the health probes, which are served even if the console is disabled."""

    enabled: bool = True
    host: str | None = None
    port: int = 4600
    keys: Secret | None = None
    """The keys; override PENSTOCK_CONSOLE_KEYS."""

    def __post_init__(self) -> None:
        _check_ports(port=self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """The whole file."""

    data_dir: str = "./penstock-data"
    host: str = "127.0.0.1"
    """The address of each part without its own `host`."""
    allow_no_keys: bool = False
    """Whether other machines may connect without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that parts without keys accept in `Host` and `Origin`, besides addresses, localhost and the
    name of this machine. `*` accepts any name."""
    stop_timeout: DurationLike = "60s"
    """How long a part may take to stop before it is killed."""
    queues: Mapping[str, QueueSettings] = field(default_factory=dict)
    collector: CollectorPart | None = None
    topics: TopicsPart | None = None
    relays: tuple[RelayPart, ...] = ()
    pipelines: tuple[PipelinePart, ...] = ()
    timeseries: TimeSeriesPart | None = None
    vector: VectorPart | None = None
    console: ConsolePart = field(default_factory=ConsolePart)

    stop_timeout_s = seconds_of("stop_timeout")

    def __post_init__(self) -> None:
        convert_units(self)
        if not self.data_dir:
            raise ConfigError("data_dir: expected a path, found nothing")
        if self.stop_timeout_s <= 0:
            raise ConfigError(f"stop_timeout: expected more than zero, found {self.stop_timeout!r}")


def read_settings(mapping: Mapping[str, Setting], *, where: str) -> UpSettings:
    """Read the settings in a mapping. Raise `ConfigError` with the place of the first error."""
    return build(UpSettings, _filled(mapping), where=where)


def faults_of(mapping: Mapping[str, Setting], *, where: str) -> list[ConfigError]:
    """Return every error that `read_settings` would raise for a mapping."""
    return faults(UpSettings, _filled(mapping), where=where)


def _filled(mapping: Mapping[str, Setting]) -> dict[str, Setting]:
    """Replace a key without a value by the part's defaults: all its settings may be comments."""
    empty: dict[str, Setting] = {
        "relays": (),
        "pipelines": (),
        "queues": {},
        **{name: {} for name in _DEFAULTED},
    }
    return {key: empty[key] if value is None and key in empty else value for key, value in mapping.items()}


def _check_ports(**ports: int) -> None:
    for name, port in ports.items():
        if not 0 <= port <= _PORT_MAX:
            raise ConfigError(f"{name}: expected 0 to {_PORT_MAX}, found {port}")
