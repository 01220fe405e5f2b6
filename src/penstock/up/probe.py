"""Asks a part over HTTP whether it does its work."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from penstock.up.life import Answer
from penstock.up.parts import Probe

__all__ = ["address_of", "ask", "reachable"]

TIMEOUT_S: Final = 5.0
_ANY: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}  # noqa: S104 - these are replaced
_OK: Final = 200


def address_of(host: str, port: int) -> str:
    """`host:port`, with an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(address: str) -> str:
    """`host:port` as this machine reaches it: a server that listens everywhere is here, too."""
    host, _, port = address.rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"


async def ask(address: str, probe: Probe) -> Answer:
    """What the probe at an address says; whatever goes wrong on the way to it is silence."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            status = await _status(reachable(address), probe)
    except (OSError, TimeoutError, ValueError):
        return Answer.SILENT
    return Answer.READY if status == _OK else Answer.NOT_READY


async def _status(address: str, probe: Probe) -> int:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        key = f"Authorization: Bearer {probe.key.reveal()}\r\n" if probe.key else ""
        head = f"GET {probe.path} HTTP/1.1\r\nHost: {address}\r\n{key}Connection: close\r\n\r\n"
        writer.write(head.encode("ascii"))
        line = await reader.readline()
        return int(line.split()[1]) if line.startswith(b"HTTP/1.") else 0
    except IndexError:
        return 0
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
