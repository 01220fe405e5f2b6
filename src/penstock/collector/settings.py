"""The `config` of each node, as frozen values. A wrong key names the nearest right one.

Where to listen and where to send: `host:port`, URLs, and who can reach them.
"""

from __future__ import annotations

import enum
import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import urlsplit

from penstock.collector.breaker import CircuitPolicy
from penstock.collector.outcome import AuthErrors
from penstock.config import Secret
from penstock.errors import ConfigError
from penstock.http import Sites, allowed_hosts
from penstock.units import DurationLike, SizeLike, parse_duration, parse_size

_PORTS: Final = {"http": 80, "https": 443}
_ANY: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, never bound here


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_reached_by(self, endpoint: Endpoint) -> bool:
        """Whether what is sent there may come back in here."""
        if self.port != endpoint.port:
            return False
        same = self.host.lower() == endpoint.host.lower()
        return same or (is_loopback(endpoint.host) and (self.host in _ANY or is_loopback(self.host)))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A destination: scheme, host, port and a path in front of `/v1/…`."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def is_secure(self) -> bool:
        return self.scheme == "https"

    @property
    def target(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target}{self.path}"


def parse_address(text: str) -> Address:
    """`host:port` or `[v6]:port`. Raises `ConfigError`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no address: write host:port, for example 127.0.0.1:4317")
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise ConfigError(f"{text!r} is no address: write the host too, for example 127.0.0.1:{port}")
    return Address(host, int(port))


def parse_endpoint(text: str, default_port: int | None = None) -> Endpoint:
    """An `http://` or `https://` URL, or `host:port`. Raises `ConfigError`; credentials are not for it."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError("the endpoint is no URL: write http://host:port") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError("the endpoint is no URL: write http://host:port or https://host:port")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("the endpoint is scheme, host, port and path alone; put credentials into headers")
    return Endpoint(
        parts.scheme, parts.hostname, port or default_port or _PORTS[parts.scheme], parts.path.rstrip("/")
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; a name that cannot be looked up counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(address[4][0]).is_loopback for address in found)


GRPC_ADDRESS: Final = "127.0.0.1:4317"
HTTP_ADDRESS: Final = "127.0.0.1:4318"


class Compression(enum.StrEnum):
    """How a request is packed on its way."""

    GZIP = "gzip"
    NONE = "none"


def _check_concurrency(concurrency: int) -> None:
    if concurrency < 1:
        raise ConfigError("concurrency must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Files in PEM. A receiver needs `cert_file` and `key_file`; an exporter may name a `ca_file`."""

    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpReceiverSettings:
    """OTLP over gRPC and HTTP. With neither address given it listens on both of the protocol's ports."""

    listening_addr: str | None = None
    """gRPC."""
    http_listening_addr: str | None = None
    response_stream_channel_size: int | None = None
    """Known from other collectors; a request here waits for its own answer, so there is no such channel."""
    max_request_bytes: SizeLike = "64MiB"
    """Counted after decompression."""
    max_in_flight: int = 1024
    """Requests under way; beyond that the next is asked to come again."""
    max_in_flight_bytes: SizeLike = "256MiB"
    tokens: tuple[Secret, ...] = ()
    """Any of these as `Authorization: Bearer …` lets a request in; none: everybody may send."""
    allow_insecure: bool = False
    """Listen where other machines reach it although there are no tokens."""
    tls: TlsSettings | None = None
    """For gRPC; for HTTP put a proxy in front."""
    allowed_hosts: tuple[str, ...] = ()
    """Without tokens: names in `Host` and `Origin` of HTTP besides addresses, localhost and this machine's
    name; `*` for any."""

    def __post_init__(self) -> None:
        for address in self.addresses:
            self._check_exposure(address)
        _ = allowed_hosts(self.allowed_hosts, "allowed_hosts")
        if self.max_in_flight < 1:
            raise ConfigError("max_in_flight must be at least 1")
        if self.in_flight_bytes < 1 or self.max_bytes < 1:
            raise ConfigError("max_request_bytes must be at least 1")
        if self.tls is not None and not (self.tls.cert_file and self.tls.key_file):
            raise ConfigError("tls: a receiver needs cert_file and key_file")

    @property
    def grpc_address(self) -> Address | None:
        if self.listening_addr is None and self.http_listening_addr is not None:
            return None
        return parse_address(self.listening_addr or GRPC_ADDRESS)

    @property
    def http_address(self) -> Address | None:
        if self.http_listening_addr is None and self.listening_addr is not None:
            return None
        return parse_address(self.http_listening_addr or HTTP_ADDRESS)

    @property
    def sites(self) -> Sites | None:
        """What keeps web pages of others out of HTTP; with tokens nothing has to."""
        if self.tokens or self.http_address is None:
            return None
        return Sites(self.http_address.host, self.allowed_hosts)

    @property
    def addresses(self) -> list[Address]:
        return [address for address in (self.grpc_address, self.http_address) if address is not None]

    @property
    def max_bytes(self) -> int:
        return parse_size(self.max_request_bytes)

    @property
    def in_flight_bytes(self) -> int:
        return max(parse_size(self.max_in_flight_bytes), self.max_bytes)

    def _check_exposure(self, address: Address) -> None:
        if self.tokens or self.allow_insecure or is_loopback(address.host):
            return
        raise ConfigError(
            f"{address} can be reached from other machines and there are no tokens: set tokens, listen on "
            "127.0.0.1, or set allow_insecure: true if that is what you want"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OtapReceiverSettings:
    """Understood, so that a file can hold it; the protocol is not implemented."""

    listening_addr: str
    response_stream_channel_size: int | None = None

    def __post_init__(self) -> None:
        _ = self.address

    @property
    def address(self) -> Address:
        return parse_address(self.listening_addr)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrow:
    payload_compression: Literal["none", "zstd", "lz4"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtapExporterSettings:
    """Understood, so that a file can hold it; the protocol is not implemented."""

    grpc_endpoint: str
    compression_method: Literal["none", "zstd", "gzip", "deflate"] = "none"
    arrow: _Arrow = field(default_factory=_Arrow)
    timeout: DurationLike = "15s"

    def __post_init__(self) -> None:
        _ = self.endpoint

    @property
    def endpoint(self) -> Endpoint:
        return parse_endpoint(self.grpc_endpoint, 4317)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How long a destination that is out of reach is left alone before one bundle is tried."""

    initial: DurationLike = "1s"
    max: DurationLike = "30s"

    def __post_init__(self) -> None:
        _ = self.policy

    @property
    def policy(self) -> CircuitPolicy:
        return CircuitPolicy(initial_s=parse_duration(self.initial), max_s=parse_duration(self.max))


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpExporterSettings:
    """OTLP to another place, over gRPC or over HTTP: one of the two endpoints."""

    grpc_endpoint: str | None = None
    http_endpoint: str | None = None
    """Everything in front of `/v1/traces`."""
    timeout: DurationLike = "15s"
    compression_method: Compression = Compression.GZIP
    concurrency: int = 5
    """Requests under way at the same time."""
    max_request_bytes: SizeLike = "64MiB"
    """Larger bundles are sent in pieces."""
    join_bytes: SizeLike = "512KiB"
    """Bundles that wait are sent together up to this size; 0 sends each by itself."""
    max_response_bytes: SizeLike = "4MiB"
    auth_errors: AuthErrors = AuthErrors.RETRY
    """The protocol calls them final, and an expired token would lose the backlog. `reject` is strict."""
    headers: dict[str, Secret] = field(default_factory=dict)
    tls: TlsSettings | None = None
    probe: ProbeSettings = field(default_factory=ProbeSettings)

    def __post_init__(self) -> None:
        if (self.grpc_endpoint is None) == (self.http_endpoint is None):
            raise ConfigError("an OTLP exporter has either a grpc_endpoint or an http_endpoint")
        _ = self.endpoint, self.join_bytes_max
        _check_concurrency(self.concurrency)
        if parse_duration(self.timeout) <= 0:
            raise ConfigError("timeout must be above 0")
        if min(parse_size(self.max_request_bytes), parse_size(self.max_response_bytes)) < 1024:
            raise ConfigError("max_request_bytes and max_response_bytes must be at least 1024")

    @property
    def endpoint(self) -> Endpoint:
        if self.grpc_endpoint is not None:
            return parse_endpoint(self.grpc_endpoint, 4317)
        assert self.http_endpoint is not None
        return parse_endpoint(self.http_endpoint, 4318)

    @property
    def timeout_s(self) -> float:
        return parse_duration(self.timeout)

    @property
    def request_bytes_max(self) -> int:
        return parse_size(self.max_request_bytes)

    @property
    def join_bytes_max(self) -> int:
        return min(parse_size(self.join_bytes), self.request_bytes_max)

    @property
    def response_bytes_max(self) -> int:
        return parse_size(self.max_response_bytes)


FileFormat = Literal["parquet", "arrow", "otlp", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """One file per bundle, named by its place: what is delivered again replaces what is there."""

    path: str
    format: FileFormat = "otlp"
    concurrency: int = 2

    def __post_init__(self) -> None:
        _check_concurrency(self.concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSettings:
    """Parquet files per signal. `spark: true`: ids as hex, times in microseconds, attributes as text too."""

    path: str
    spark: bool = False
    concurrency: int = 2

    def __post_init__(self) -> None:
        _check_concurrency(self.concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """A queue per signal in object storage; `{signal}` in a path stands for traces, metrics or logs."""

    store: str
    manifest_path: str = "telemetry/{signal}/manifest"
    data_path_prefix: str = "telemetry/{signal}"
    format: Literal["arrow", "otlp"] = "arrow"
    """What one record holds: an Arrow stream of the flat columns, or the OTLP request."""
    batch_compression: Literal["none", "zstd"] = "zstd"
    flush_size: SizeLike = "16MiB"
    flush_bundles: int = 512
    append_deadline: DurationLike = "60s"
    name: str | None = None
    """Under which name it commits; the node's own by default."""

    def __post_init__(self) -> None:
        for path in (self.manifest_path, self.data_path_prefix):
            if "{signal}" not in path:
                raise ConfigError(f"{path!r} needs {{signal}} in it: each signal is a queue of its own")
        if self.flush_bundles < 1 or parse_size(self.flush_size) < 1:
            raise ConfigError("flush_size and flush_bundles must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSettings:
    """A line in the log for each bundle."""

    verbosity: Literal["basic", "detailed"] = "basic"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoopSettings:
    """Takes everything and keeps nothing."""

    concurrency: int = 5

    def __post_init__(self) -> None:
        _check_concurrency(self.concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlakySettings:
    """For tests: fails a share of its attempts, by a seed; what it takes goes to `path` if there is one."""

    failure_rate: float = 0.5
    reject_rate: float = 0.0
    retry_after: DurationLike | None = None
    seed: int = 0
    path: str | None = None
    concurrency: int = 1

    def __post_init__(self) -> None:
        _check_concurrency(self.concurrency)
        if not (0 <= self.failure_rate <= 1 and 0 <= self.reject_rate <= 1):
            raise ConfigError("failure_rate and reject_rate are shares from 0 to 1")
