"""Where to listen and where to send: `host:port`, URLs, and who can reach them."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from penstock.errors import ConfigError

__all__ = ["Address", "Endpoint", "is_loopback", "parse_address", "parse_endpoint"]

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
