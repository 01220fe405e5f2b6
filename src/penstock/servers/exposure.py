"""Whether others could reach a server without a key."""

from __future__ import annotations

import ipaddress
import socket

from penstock.errors import ConfigError

__all__ = ["check_reach", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is this machine's own."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in found)


def check_reach(host: str, *, has_keys: bool, allowed: bool, way_out: str) -> None:
    """Raises `ConfigError`, with `way_out`, if other machines could reach a server without keys."""
    if has_keys or allowed or is_loopback(host):
        return
    raise ConfigError(f"host {host!r} can be reached from other machines and there are no keys: {way_out}")
