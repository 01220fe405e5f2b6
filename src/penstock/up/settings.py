"""The file of `penstock up`: which parts run on this machine, and where each keeps its data.

A part runs if its key is in the file. What is left out of it has the default that is stated here; relative
paths are relative to the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from penstock.config import Secret, Setting, build, faults
from penstock.errors import ConfigError
from penstock.topics import is_topic_name
from penstock.units import DurationLike, parse_duration

_PORT_MAX: Final = 65535
_START: Final = re.compile(r"earliest|latest|[0-9]+")
_FIELD: Final = re.compile(r".+:(string|int64|float64|bool|text)(:indexed)?")
_DEFAULTED: Final = ("topics", "collector", "timeseries", "vector", "console")
"""Parts that run with their defaults when their key stands in the file with nothing behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """A queue that is not where queues are by default."""

    store: str = ""
    """Its address; by default `queues` in the data directory. What a store needs to let one in comes from
    the environment."""
    manifest_path: str = ""
    """By default NAME/manifest."""
    data_path_prefix: str = ""
    """By default NAME."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsSettings:
    """The topics server. Every other setting of it is a `TOPICS_*` variable of the environment."""

    enabled: bool = True
    host: str | None = None
    port: int = 4000
    data_dir: str = ""
    """By default `topics` in the data directory."""
    keys: Secret | None = None
    """`key[:scopes[:prefixes]],…`, as TOPICS_API_KEYS, which it stands in for."""

    def __post_init__(self) -> None:
        _check_ports(port=self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """A topic moved into a queue, each record once."""

    topic: str
    queue: str
    name: str = ""
    """Of the part; by default the topic's."""
    app: str = ""
    """The name of its position in the queue; by default relay:TOPIC."""
    value: Literal["record", "data"] = "record"
    on_gap: Literal["fail", "skip", "record"] = "fail"
    after: str = "earliest"
    flush_interval: DurationLike = "100ms"
    create: bool = True
    """Make the topic if there is none of that name."""

    def __post_init__(self) -> None:
        parse_duration(self.flush_interval)
        if not is_topic_name(self.topic):
            raise ConfigError(
                "topic: start with a letter or digit, then letters, digits, '.', '_', ':' or '-', "
                f"255 characters at most, found {self.topic[:80]!r}"
            )
        if not _START.fullmatch(self.after):
            raise ConfigError(f"after: expected earliest, latest or a sequence, found {self.after[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings:
    """The collector: of a file of its own, of a mapping with the keys of such a file, or the one below.

    Without `file` and `config` it keeps what it takes in the data directory, and puts each signal into a
    queue of its own: `metrics`, `traces` and `logs`.
    """

    enabled: bool = True
    file: str | None = None
    config: Mapping[str, object] | None = None
    host: str | None = None
    grpc_port: int = 4317
    http_port: int = 4318
    admin_port: int = 9464
    store: str = ""
    """Where its queues are; by default `queues` in the data directory."""
    tokens: tuple[Secret, ...] = ()
    """Any of these as `Authorization: Bearer …` lets a request in."""

    def __post_init__(self) -> None:
        if self.file is not None and self.config is not None:
            raise ConfigError("give file or config, not both")
        _check_ports(grpc_port=self.grpc_port, http_port=self.http_port, admin_port=self.admin_port)

    @property
    def is_default(self) -> bool:
        """Whether its file is written by the fleet from the other keys."""
        return self.file is None and self.config is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """A pipeline of Spark."""

    file: str
    name: str = ""
    """Of the part; by default the file's, without its ending."""
    master: str | None = None
    remote: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.master is not None and self.remote is not None:
            raise ConfigError("give master or remote, not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesSettings:
    """The database of time series."""

    enabled: bool = True
    host: str | None = None
    port: int = 9090
    store: str = ""
    """By default `timeseries` in the data directory."""
    queue: str | None = None
    """The queue it takes OTLP metrics from."""
    retention: DurationLike | None = None
    config: str | None = None
    """A file with more settings of the database."""
    keys: Secret | None = None

    def __post_init__(self) -> None:
        _check_ports(port=self.port)
        if self.retention is not None:
            parse_duration(self.retention)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings:
    """The vector database."""

    enabled: bool = True
    host: str | None = None
    port: int = 8080
    store: str = ""
    """By default `vector` in the data directory."""
    queue: str | None = None
    """The queue it takes vectors from."""
    dimensions: int | None = None
    metric: Literal["l2", "cosine", "dot"] | None = None
    fields: tuple[str, ...] = ()
    """NAME:TYPE[:indexed], as of `penstock vector serve --field`."""
    config: str | None = None
    keys: Secret | None = None

    def __post_init__(self) -> None:
        _check_ports(port=self.port)
        for text in self.fields:
            if not _FIELD.fullmatch(text):
                raise ConfigError(f"fields: write NAME:TYPE or NAME:TYPE:indexed, found {text[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """The console, and the probes of the whole, which stay when it is switched off."""

    enabled: bool = True
    host: str | None = None
    port: int = 4600
    keys: Secret | None = None
    """As PENSTOCK_CONSOLE_KEYS, which it stands in for."""

    def __post_init__(self) -> None:
        _check_ports(port=self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """The whole file."""

    data_dir: str = "./penstock-data"
    host: str = "127.0.0.1"
    """Where parts listen that do not say it themselves."""
    allow_no_keys: bool = False
    """Let other machines in without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Without keys: names of every part in `Host` and `Origin` besides addresses, localhost and this
    machine's name; `*` for any."""
    stop_timeout: DurationLike = "60s"
    """How long each part may take to stop before it is killed."""
    queues: Mapping[str, QueueSettings] = field(default_factory=dict)
    collector: CollectorSettings | None = None
    topics: TopicsSettings | None = None
    relays: tuple[RelaySettings, ...] = ()
    pipelines: tuple[PipelineSettings, ...] = ()
    timeseries: TimeSeriesSettings | None = None
    vector: VectorSettings | None = None
    console: ConsoleSettings = field(default_factory=ConsoleSettings)

    def __post_init__(self) -> None:
        if not self.data_dir:
            raise ConfigError("data_dir: expected a path, found nothing")
        if self.stop_timeout_s <= 0:
            raise ConfigError(f"stop_timeout: expected more than zero, found {self.stop_timeout!r}")

    @property
    def stop_timeout_s(self) -> float:
        return parse_duration(self.stop_timeout)


def read_settings(mapping: Mapping[str, Setting], *, where: str) -> UpSettings:
    """The settings in a mapping. Raises `ConfigError` with the place of the first mistake."""
    return build(UpSettings, _filled(mapping), where=where)


def faults_of(mapping: Mapping[str, Setting], *, where: str) -> list[ConfigError]:
    """Everything that is wrong with a mapping by itself; nothing if `read_settings` takes it."""
    return faults(UpSettings, _filled(mapping), where=where)


def _filled(mapping: Mapping[str, Setting]) -> dict[str, Setting]:
    """A part's key with nothing behind it, all of its settings being comments, is the part as it comes."""
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
