"""Where a server of time series listens, who may use it, and when a write is acknowledged."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from penstock.coordinator import Durability
from penstock.errors import ConfigError
from penstock.http import Keyring, allowed_hosts
from penstock.servers.settings import check_reach
from penstock.timeseries import BODY_BYTES_MAX
from penstock.units import DurationLike, SizeLike, parse_duration, parse_size


class Acknowledge(enum.StrEnum):
    """What has become of a write when its sender gets the answer."""

    DURABLE = "durable"
    APPLIED = "applied"
    """In memory only: a crash loses what was not flushed yet."""

    @property
    def level(self) -> Durability:
        return Durability.DURABLE if self is Acknowledge.DURABLE else Durability.APPLIED


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesSettings:
    """Raises `ConfigError` for what cannot work, and for a server that others could reach without a key."""

    host: str = "127.0.0.1"
    port: int = 9090
    port_file: str | None = None
    keys: Keyring = field(default_factory=Keyring)
    allow_no_keys: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Without keys: names in `Host` and `Origin` besides addresses, localhost and this machine's name;
    `*` for any."""
    acknowledge: Acknowledge = Acknowledge.DURABLE
    write_timeout: DurationLike = "5s"
    """How long a write waits for room before its sender is told to come back."""
    acknowledge_timeout: DurationLike = "30s"
    """How long a write that was taken waits for the storage before its sender is told to send it again."""
    max_body_bytes: SizeLike = BODY_BYTES_MAX
    """Of one write, unpacked."""
    max_decoded_bytes: SizeLike = "128MiB"
    """Of all writes that are unpacked and not applied yet; more are told to come back. In memory they take
    several times as much while they are read, and up to 40 times where each point is a series of its own."""
    requests_max: int = 1000
    """Requests of readers under way, and as many of writers; more are told to come back."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is not one from 0 to 65535")
        _ = allowed_hosts(self.allowed_hosts, "allowed_hosts")
        if self.keys.has_prefixes:
            raise ConfigError(
                "TIMESERIES_API_KEYS: keys of a database take no prefixes; each covers all of it"
            )
        if self.requests_max < 1 or self.body_bytes_max < 1:
            raise ConfigError("requests_max and max_body_bytes must be at least 1")
        if self.decoded_bytes_max < self.body_bytes_max:
            raise ConfigError("max_decoded_bytes must be at least max_body_bytes, or no such body could come")
        if self.acknowledge_timeout_s <= 0:
            raise ConfigError("acknowledge_timeout must be longer than nothing")
        _ = self.write_timeout_s
        check_reach(
            self.host,
            has_keys=bool(len(self.keys)),
            allowed=self.allow_no_keys,
            way_out="set TIMESERIES_API_KEYS, or bind to 127.0.0.1, or pass --allow-no-keys if that is "
            "what you want",
        )

    @property
    def write_timeout_s(self) -> float:
        return parse_duration(self.write_timeout)

    @property
    def acknowledge_timeout_s(self) -> float:
        return parse_duration(self.acknowledge_timeout)

    @property
    def decoded_bytes_max(self) -> int:
        return parse_size(self.max_decoded_bytes)

    @property
    def body_bytes_max(self) -> int:
        return parse_size(self.max_body_bytes)
