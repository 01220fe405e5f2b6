"""Settings of the servers: the `TOPICS_*` variables, and the common settings of both database servers.

A wrong value raises `ConfigError`, which states the value and what is expected.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from penstock.config import check_whole_numbers, closest
from penstock.errors import ConfigError
from penstock.http import Keyring, allowed_hosts
from penstock.objects import StoreAddress
from penstock.servers.limits import StreamLimits
from penstock.topics import WAL_SHARDS_MAX, EngineConfig
from penstock.units import DurationLike, SizeLike, convert_units, seconds_of, size_of

_TRUE: Final = frozenset({"1", "true"})
_FALSE: Final = frozenset({"", "0", "false"})
_LEVELS: Final = ("debug", "info", "warning", "error")
_PREFIX: Final = "TOPICS_"
_READ: Final = (
    *("HOST", "PORT", "PORT_FILE", "DATA_DIR", "COLD_DIR", "LOG"),
    *("API_KEYS", "PROBE_AUTH", "ALLOW_INSECURE_NO_AUTH", "ALLOWED_HOSTS"),
    *("WAL_SHARDS", "SEGMENT_MAX_EVENTS", "SEGMENT_MAX_BYTES", "SEGMENT_MAX_AGE_MS"),
    *("HOT_RETAIN_SEGMENTS", "HOT_RETAIN_BYTES"),
    *("MAX_BODY_BYTES", "MAX_TOPICS", "MAX_ROUTERS", "MAX_INFLIGHT_PER_KEY", "MAX_TOTAL_BYTES"),
    *("MAX_WATCH_SESSIONS", "MAX_SSE_CONNECTIONS", "MAX_SSE_CONNECTIONS_PER_KEY", "TEST_MIN_HEARTBEAT_MS"),
)
_NOT_READ: Final = frozenset(
    {
        # Variables of the contract for limits that are fixed here.
        *("MAX_BATCH_RECORDS", "MAX_RECORD_BYTES", "MAX_META_BYTES", "MAX_TAG_BYTES", "MAX_NODE_BYTES"),
        *("MAX_LIMIT", "MAX_WATCH_TOPICS", "MAX_CLAIM"),
        # Variables of the client, which may run in the same environment.
        *("URL", "API_KEY"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """All settings of `penstock topics serve`."""

    host: str = "127.0.0.1"
    port: int = 4000
    port_file: str | None = None
    keys: Keyring = field(default_factory=Keyring)
    probes_need_key: bool = False
    allow_no_keys: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Names accepted in `Host` and `Origin` by a server without keys, in addition to addresses, localhost and
    the name of this machine. `*` accepts any name."""
    body_bytes_max: int = 64 * 1024**2
    in_flight_per_key_max: int = 1000
    streams: StreamLimits = field(default_factory=StreamLimits)
    log_level: str = "info"
    engine: EngineConfig

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> ServerSettings:
        """Read the environment. Raise `ConfigError` naming the variable."""
        env = _Environment(environ)
        host, port = env.address()
        return cls(
            host=host,
            port=port,
            port_file=env.text("TOPICS_PORT_FILE"),
            keys=Keyring.parse(env.text("TOPICS_API_KEYS") or ""),
            probes_need_key=env.flag("TOPICS_PROBE_AUTH"),
            allow_no_keys=env.flag("TOPICS_ALLOW_INSECURE_NO_AUTH"),
            allowed_hosts=env.hosts(),
            body_bytes_max=env.number("TOPICS_MAX_BODY_BYTES", 64 * 1024**2, least=1),
            in_flight_per_key_max=env.number("TOPICS_MAX_INFLIGHT_PER_KEY", 1000),
            streams=env.streams(),
            log_level=env.level("TOPICS_LOG"),
            engine=env.engine(),
        )


class _Environment:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str) -> str | None:
        return self._environ.get(name, "").strip() or None

    def flag(self, name: str) -> bool:
        text = (self.text(name) or "").lower()
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise ConfigError(f"{name} is {text!r}: write 1 or true, 0 or false")

    def hosts(self) -> tuple[str, ...]:
        text = self.text("TOPICS_ALLOWED_HOSTS")
        return allowed_hosts(text.split(","), "TOPICS_ALLOWED_HOSTS") if text else ()

    def number(self, name: str, default: int, *, least: int = 0) -> int:
        text = self.text(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) >= least):
            raise ConfigError(f"{name} is {text!r}: write a whole number of at least {least}")
        return int(text)

    def level(self, name: str) -> str:
        text = (self.text(name) or "info").lower()
        level = "warning" if text == "warn" else text
        if level not in _LEVELS:
            raise ConfigError(f"{name} is {text!r}: write one of {', '.join(_LEVELS)}")
        return level

    def shards(self) -> int:
        """Return the number of shards. The contract maps 0 and text that is not a number to the default."""
        text = self.text("TOPICS_WAL_SHARDS") or ""
        digits = text.lstrip("0") if text.isascii() and text.isdigit() else ""
        if not digits:
            return min(os.cpu_count() or 1, 8)
        if len(digits) > 4 or int(digits) > WAL_SHARDS_MAX:
            raise ConfigError(f"TOPICS_WAL_SHARDS is {text[:20]!r}: write 1 to {WAL_SHARDS_MAX}")
        return int(digits)

    def cold_dir(self) -> str | None:
        place = self.text("TOPICS_COLD_DIR")
        if place is not None and "://" in place:
            try:
                StoreAddress.parse(place)
            except ConfigError as error:
                raise ConfigError(f"TOPICS_COLD_DIR: {str(error).removeprefix('store: ')}") from error
        return place

    def address(self) -> tuple[str, int]:
        host = self.text("TOPICS_HOST") or "127.0.0.1"
        port = self.number("TOPICS_PORT", 4000)
        if ":" in host and not _is_ip(host):
            host, _, text = host.rpartition(":")
            if not (text.isascii() and text.isdigit()):
                raise ConfigError(f"TOPICS_HOST ends in {text!r}, which is not a port: write host:port")
            port = int(text)
        if port > 65535:
            raise ConfigError(f"the port is {port}: write one from 0 to 65535")
        return host.removeprefix("[").removesuffix("]"), port

    def streams(self) -> StreamLimits:
        known = StreamLimits()
        floor = self.number("TOPICS_TEST_MIN_HEARTBEAT_MS", known.heartbeat_ms_min, least=1)
        return StreamLimits(
            sessions_max=self.number("TOPICS_MAX_WATCH_SESSIONS", known.sessions_max),
            connections_max=self.number("TOPICS_MAX_SSE_CONNECTIONS", known.connections_max),
            connections_per_key_max=self.number(
                "TOPICS_MAX_SSE_CONNECTIONS_PER_KEY", known.connections_per_key_max
            ),
            heartbeat_ms_min=min(floor, known.heartbeat_ms_min),
        )

    def engine(self) -> EngineConfig:
        try:
            return self._engine()
        except ConfigError as error:
            # An error of the engine starts with the name of a field, which is that of its variable.
            field_name, _, rest = str(error).partition(":")
            known = field_name in EngineConfig.__dataclass_fields__
            raise ConfigError(f"{_PREFIX}{field_name.upper()}:{rest}" if known else str(error)) from error

    def _engine(self) -> EngineConfig:
        known = EngineConfig(data_dir=self.text("TOPICS_DATA_DIR") or "./topics-data")
        return EngineConfig(
            data_dir=known.data_dir,
            cold_dir=self.cold_dir(),
            wal_shards=self.shards(),
            segment_max_events=self.number("TOPICS_SEGMENT_MAX_EVENTS", known.segment_max_events, least=1),
            segment_max_bytes=self.number("TOPICS_SEGMENT_MAX_BYTES", known.segment_max_bytes, least=1),
            segment_max_age_ms=self.number("TOPICS_SEGMENT_MAX_AGE_MS", known.segment_max_age_ms),
            hot_retain_segments=self.number("TOPICS_HOT_RETAIN_SEGMENTS", known.hot_retain_segments),
            hot_retain_bytes=self.number("TOPICS_HOT_RETAIN_BYTES", known.hot_retain_bytes),
            segment_process=True,
            max_topics=self.number("TOPICS_MAX_TOPICS", known.max_topics),
            max_routers=self.number("TOPICS_MAX_ROUTERS", known.max_routers),
            max_total_bytes=self.number("TOPICS_MAX_TOTAL_BYTES", known.max_total_bytes),
        )


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each unknown `TOPICS_*` variable. Never quote a value: it may be a secret."""
    names = sorted(name.removeprefix(_PREFIX) for name in environ if name.startswith(_PREFIX))
    sentences = []
    for name in names:
        if name in _READ or name in _NOT_READ:
            continue
        near = closest(name, _READ)
        hint = f"; did you mean {_PREFIX}{near}?" if near else ""
        sentences.append(f"{_PREFIX}{name} is set but is not a known variable{hint}")
    return sentences


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_exposure(settings: ServerSettings) -> None:
    """Raise `ConfigError` if other machines could reach a server without keys."""
    if len(settings.keys) or settings.allow_no_keys or is_loopback(settings.host):
        return
    raise ConfigError(
        f"TOPICS_HOST {settings.host!r} can be reached from other machines and there are no keys: "
        "set TOPICS_API_KEYS, or bind to 127.0.0.1, "
        "or set TOPICS_ALLOW_INSECURE_NO_AUTH=1 to allow this"
    )


def check_places(settings: ServerSettings) -> None:
    """Raise `ConfigError` if a configured directory exists but is not a directory."""
    places = {"TOPICS_DATA_DIR": settings.engine.data_dir, "TOPICS_COLD_DIR": settings.engine.cold_dir}
    for name, place in places.items():
        if place is None or "://" in place:
            continue
        path = os.path.expanduser(place) if name == "TOPICS_COLD_DIR" else place
        if os.path.exists(path) and not os.path.isdir(path):
            raise ConfigError(f"{name} is {place!r}, which is not a directory")


def is_loopback(host: str) -> bool:
    """Return whether every address of `host` belongs to this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in found)


def check_reach(host: str, *, has_keys: bool, allowed: bool, remedy: str) -> None:
    """Raise `ConfigError`, ending with `remedy`, if other machines could reach a server without keys."""
    if has_keys or allowed or is_loopback(host):
        return
    raise ConfigError(f"host {host!r} can be reached from other machines and there are no keys: {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSettings:
    """The address of a database server, its keys, and its limits.

    Raise `ConfigError` for invalid values, and for a server without keys that other machines can reach.
    """

    KEYS_VARIABLE: ClassVar[str]

    host: str = "127.0.0.1"
    port: int
    port_file: str | None = None
    keys: Keyring = field(default_factory=Keyring)
    allow_no_keys: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Names accepted in `Host` and `Origin` by a server without keys, in addition to addresses, localhost and
    the name of this machine. `*` accepts any name."""
    write_timeout: DurationLike = "5s"
    """How long a write waits for space before it is refused; the client must then retry it."""
    acknowledge_timeout: DurationLike = "30s"
    """How long an accepted write waits for the storage. After that, the client does not know its outcome."""
    max_body_bytes: SizeLike
    """The size limit of one decompressed write."""
    max_decoded_bytes: SizeLike
    """The memory limit for all writes that are decoded but not applied. More writes are refused; clients must
    retry them."""
    requests_max: int = 1000
    """The limit of requests in progress. More are refused; clients must retry them."""

    write_timeout_s = seconds_of("write_timeout")
    acknowledge_timeout_s = seconds_of("acknowledge_timeout")
    body_bytes_max = size_of("max_body_bytes")
    decoded_bytes_max = size_of("max_decoded_bytes")

    def __post_init__(self) -> None:
        convert_units(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is not between 0 and 65535")
        _ = allowed_hosts(self.allowed_hosts, "allowed_hosts")
        if self.keys.has_prefixes:
            raise ConfigError(
                f"{self.KEYS_VARIABLE}: database keys take no prefixes; each key covers the whole database"
            )
        check_whole_numbers(self, 1, "requests_max", "max_body_bytes")
        if self.decoded_bytes_max < self.body_bytes_max:
            raise ConfigError("max_decoded_bytes must be at least max_body_bytes")
        if self.acknowledge_timeout_s <= 0:
            raise ConfigError("acknowledge_timeout must be above 0")
        check_reach(
            self.host,
            has_keys=bool(len(self.keys)),
            allowed=self.allow_no_keys,
            remedy=f"set {self.KEYS_VARIABLE}, or bind to 127.0.0.1, or pass --allow-no-keys to allow this",
        )
