"""Where a vector server listens, who may use it, and when a write is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.coordinator import Durability
from penstock.errors import ConfigError
from penstock.http import Keyring, allowed_hosts
from penstock.servers.settings import check_reach
from penstock.units import DurationLike, SizeLike, parse_duration, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings:
    """Raises `ConfigError` for what cannot work, and for a server that others could reach without a key."""

    host: str = "127.0.0.1"
    port: int = 8080
    port_file: str | None = None
    keys: Keyring = field(default_factory=Keyring)
    allow_no_keys: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Without keys: names in `Host` and `Origin` besides addresses, localhost and this machine's name;
    `*` for any."""
    acknowledge: str = "durable"
    """What has become of a write when its sender gets the answer: applied, flushed (visible) or durable."""
    write_timeout: DurationLike = "5s"
    """How long a write waits for room before its sender is told to come back."""
    acknowledge_timeout: DurationLike = "30s"
    """How long a write may take in all before its sender is told that nobody knows whether it is stored."""
    max_body_bytes: SizeLike = "64MiB"
    max_decoded_bytes: SizeLike = "512MiB"
    """What bodies take in memory, once they are read, over all requests; more are told to come back. A number
    of a few characters becomes 32 bytes."""
    requests_max: int = 1000
    """Requests under way; more are told to come back."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is not one from 0 to 65535")
        _ = allowed_hosts(self.allowed_hosts, "allowed_hosts")
        if self.keys.has_prefixes:
            raise ConfigError("VECTOR_API_KEYS: keys of a database take no prefixes; each covers all of it")
        if self.requests_max < 1 or self.body_bytes_max < 1:
            raise ConfigError("requests_max and max_body_bytes must be at least 1")
        if self.decoded_bytes_max < self.body_bytes_max:
            raise ConfigError("max_decoded_bytes must be at least max_body_bytes, or no such body could come")
        if self.write_timeout_s < 0 or self.acknowledge_timeout_s <= 0:
            raise ConfigError("write_timeout is not negative, and acknowledge_timeout longer than nothing")
        _ = self.level
        check_reach(
            self.host,
            has_keys=bool(len(self.keys)),
            allowed=self.allow_no_keys,
            way_out="set VECTOR_API_KEYS, or bind to 127.0.0.1, or pass --allow-no-keys if that is what "
            "you want",
        )

    @property
    def level(self) -> Durability:
        try:
            return Durability[self.acknowledge.upper()]
        except KeyError:
            raise ConfigError(
                f"acknowledge is one of 'applied', 'flushed', 'durable', not {self.acknowledge!r}"
            ) from None

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
