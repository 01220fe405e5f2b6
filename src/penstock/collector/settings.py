"""The `config` of each node of a collector, and the addresses of receivers and destinations."""

from __future__ import annotations

import enum
import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import urlsplit

from penstock.collector.breaker import CircuitPolicy
from penstock.collector.outcome import AuthErrors
from penstock.config import Secret, check_whole_numbers
from penstock.errors import ConfigError
from penstock.http import Sites, allowed_hosts
from penstock.units import DurationLike, SizeLike, convert_units, seconds_of, size_of

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
        """Return whether data sent to `endpoint` may arrive at this address."""
        if self.port != endpoint.port:
            return False
        same = self.host.lower() == endpoint.host.lower()
        return same or (is_loopback(endpoint.host) and (self.host in _ANY or is_loopback(self.host)))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A destination: scheme, host, port and a path prefix before `/v1/…`."""

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
    """Parse `host:port` or `[v6]:port`. Raise `ConfigError`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address: write host:port, for example 127.0.0.1:4317")
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise ConfigError(f"{text!r} is not an address: include the host, for example 127.0.0.1:{port}")
    return Address(host, int(port))


def parse_endpoint(text: str, default_port: int | None = None) -> Endpoint:
    """Parse an `http://` or `https://` URL, or `host:port`, without credentials. Raise `ConfigError`."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError("the endpoint is not a URL: write http://host:port") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError("the endpoint is not a URL: write http://host:port or https://host:port")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "the endpoint must be scheme, host, port and path only; put credentials into headers"
        )
    return Endpoint(
        parts.scheme, parts.hostname, port or default_port or _PORTS[parts.scheme], parts.path.rstrip("/")
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. An unknown name counts as reachable."""
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
    """The compression of a request."""

    GZIP = "gzip"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """PEM files. A receiver needs `cert_file` and `key_file`; an exporter may name a `ca_file`."""

    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpReceiverSettings:
    """The settings of an OTLP receiver. Without an address it listens on both default ports."""

    listening_addr: str | None = None
    """The address for gRPC."""
    http_listening_addr: str | None = None
    response_stream_channel_size: int | None = None
    """Accepted for compatibility and ignored: each request waits for its own response, without a channel."""
    max_request_bytes: SizeLike = "64MiB"
    """The size limit of a decompressed request."""
    max_in_flight: int = 1024
    """The maximum number of requests in progress. Clients must retry the requests beyond it."""
    max_in_flight_bytes: SizeLike = "256MiB"
    tokens: tuple[Secret, ...] = ()
    """The accepted bearer tokens. A request needs one of them in `Authorization`. Without tokens every client
    may send.
    """
    allow_insecure: bool = False
    """Whether to listen on an address that other machines can reach even without tokens."""
    tls: TlsSettings | None = None
    """The TLS files for gRPC. For HTTP, use a proxy."""
    allowed_hosts: tuple[str, ...] = ()
    """The accepted names in `Host` and `Origin` of HTTP requests, if there are no tokens.

    Addresses, localhost and the name of this machine are always accepted. `*` accepts any name.
    """

    max_bytes = size_of("max_request_bytes")
    _in_flight_bytes = size_of("max_in_flight_bytes")

    def __post_init__(self) -> None:
        convert_units(self)
        for address in self.addresses:
            self._check_exposure(address)
        _ = allowed_hosts(self.allowed_hosts, "allowed_hosts")
        check_whole_numbers(self, 1, "max_in_flight", "max_request_bytes")
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
        """The check of `Host` and `Origin` that blocks foreign web pages. Not needed with tokens."""
        if self.tokens or self.http_address is None:
            return None
        return Sites(self.http_address.host, self.allowed_hosts)

    @property
    def addresses(self) -> list[Address]:
        return [address for address in (self.grpc_address, self.http_address) if address is not None]

    @property
    def in_flight_bytes(self) -> int:
        return max(self._in_flight_bytes, self.max_bytes)

    def _check_exposure(self, address: Address) -> None:
        if self.tokens or self.allow_insecure or is_loopback(address.host):
            return
        raise ConfigError(
            f"{address} can be reached from other machines and there are no tokens: set tokens, listen on "
            "127.0.0.1, or set allow_insecure: true if that is what you want"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OtapReceiverSettings:
    """The settings of an OTAP receiver. They are validated, but the protocol is not implemented."""

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
    """The settings of an OTAP exporter. They are validated, but the protocol is not implemented."""

    grpc_endpoint: str
    compression_method: Literal["none", "zstd", "gzip", "deflate"] = "none"
    arrow: _Arrow = field(default_factory=_Arrow)
    timeout: DurationLike = "15s"

    timeout_s = seconds_of("timeout")

    def __post_init__(self) -> None:
        convert_units(self)
        _ = self.endpoint

    @property
    def endpoint(self) -> Endpoint:
        return parse_endpoint(self.grpc_endpoint, 4317)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """The delay before an unreachable destination is probed with one bundle."""

    initial: DurationLike = "1s"
    max: DurationLike = "30s"

    _initial_s = seconds_of("initial")
    _max_s = seconds_of("max")

    def __post_init__(self) -> None:
        convert_units(self)
        _ = self.policy

    @property
    def policy(self) -> CircuitPolicy:
        return CircuitPolicy(initial_s=self._initial_s, max_s=self._max_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpExporterSettings:
    """The settings of an OTLP exporter over gRPC or HTTP. Exactly one of the two endpoints must be set."""

    grpc_endpoint: str | None = None
    http_endpoint: str | None = None
    """The URL without `/v1/traces`."""
    timeout: DurationLike = "15s"
    compression_method: Compression = Compression.GZIP
    concurrency: int = 5
    """The maximum number of concurrent requests."""
    max_request_bytes: SizeLike = "64MiB"
    """The maximum size of a request. Larger bundles are split."""
    join_bytes: SizeLike = "512KiB"
    """The size up to which waiting bundles are joined. With 0 each one is sent separately."""
    max_response_bytes: SizeLike = "4MiB"
    auth_errors: AuthErrors = AuthErrors.RETRY
    """The treatment of authentication errors.

    The protocol says not to retry them, but then an expired token would lose the backlog. `reject` follows
    the protocol.
    """
    headers: dict[str, Secret] = field(default_factory=dict)
    tls: TlsSettings | None = None
    probe: ProbeSettings = field(default_factory=ProbeSettings)

    timeout_s = seconds_of("timeout")
    request_bytes_max = size_of("max_request_bytes")
    _join_bytes = size_of("join_bytes")
    response_bytes_max = size_of("max_response_bytes")

    def __post_init__(self) -> None:
        convert_units(self)
        if (self.grpc_endpoint is None) == (self.http_endpoint is None):
            raise ConfigError("an OTLP exporter needs either grpc_endpoint or http_endpoint")
        _ = self.endpoint
        check_whole_numbers(self, 1, "concurrency")
        if self.timeout_s <= 0:
            raise ConfigError("timeout must be above 0")
        if min(self.request_bytes_max, self.response_bytes_max) < 1024:
            raise ConfigError("max_request_bytes and max_response_bytes must be at least 1024")

    @property
    def endpoint(self) -> Endpoint:
        if self.grpc_endpoint is not None:
            return parse_endpoint(self.grpc_endpoint, 4317)
        assert self.http_endpoint is not None
        return parse_endpoint(self.http_endpoint, 4318)

    @property
    def join_bytes_max(self) -> int:
        return min(self._join_bytes, self.request_bytes_max)


FileFormat = Literal["parquet", "arrow", "otlp", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """The settings of an exporter that writes one file per bundle.

    A file is named by the position of its bundle, so that a repeated delivery replaces it.
    """

    path: str
    format: FileFormat = "otlp"
    concurrency: int = 2

    def __post_init__(self) -> None:
        check_whole_numbers(self, 1, "concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSettings:
    """The settings of an exporter that writes Parquet files for each signal.

    `spark: true` writes ids as hex, times in microseconds, and attributes also as text.
    """

    path: str
    spark: bool = False
    concurrency: int = 2

    def __post_init__(self) -> None:
        check_whole_numbers(self, 1, "concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """A queue per signal in object storage. `{signal}` in a path stands for traces, metrics or logs."""

    store: str
    manifest_path: str = "telemetry/{signal}/manifest"
    data_path_prefix: str = "telemetry/{signal}"
    format: Literal["arrow", "otlp"] = "arrow"
    """The content of a record: an Arrow stream of the flat columns, or the OTLP request."""
    batch_compression: Literal["none", "zstd"] = "zstd"
    flush_size: SizeLike = "16MiB"
    flush_bundles: int = 512
    append_deadline: DurationLike = "60s"
    name: str | None = None
    """The name under which the exporter commits. The default is the name of the node."""

    flush_bytes = size_of("flush_size")
    append_deadline_s = seconds_of("append_deadline")

    def __post_init__(self) -> None:
        convert_units(self)
        for path in (self.manifest_path, self.data_path_prefix):
            if "{signal}" not in path:
                raise ConfigError(f"{path!r} must contain {{signal}}, because each signal has its own queue")
        check_whole_numbers(self, 1, "flush_bundles", "flush_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSettings:
    """The settings of an exporter that logs a line for each bundle."""

    verbosity: Literal["basic", "detailed"] = "basic"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoopSettings:
    """The settings of an exporter that accepts every bundle and discards it."""

    concurrency: int = 5

    def __post_init__(self) -> None:
        check_whole_numbers(self, 1, "concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlakySettings:
    """The settings of a test exporter that fails a share of the attempts.

    Accepted bundles are written to `path`, if it is set.
    """

    failure_rate: float = 0.5
    reject_rate: float = 0.0
    retry_after: DurationLike | None = None
    seed: int = 0
    path: str | None = None
    concurrency: int = 1

    retry_after_s = seconds_of("retry_after", optional=True)

    def __post_init__(self) -> None:
        convert_units(self)
        check_whole_numbers(self, 1, "concurrency")
        if not (0 <= self.failure_rate <= 1 and 0 <= self.reject_rate <= 1):
            raise ConfigError("failure_rate and reject_rate must be from 0 to 1")
