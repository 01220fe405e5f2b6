"""Measure the cost per byte of unauthenticated traffic: `python benchmarks/http_cost.py`.

A server with a key, in its own process, receives each attack from clients without a key. CPU is that of the
server's process per byte sent; memory is the growth of its resident size per byte sent. The reference is a
small request without a body in the same run: an attack is bounded if its bytes cost no more than those of
ordinary traffic, or if the server closes the connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpack import Encoder

from penstock.http.h2 import PREFACE
from table import Row, print_table

CONNECTIONS = 20
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HEAD = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/v0/topics/x"),
    (b":authority", b"localhost"),
]


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def h2_start() -> bytes:
    return PREFACE + frame(4, 0, 0)


def settings(keys: range) -> bytes:
    return frame(4, 0, 0, b"".join(key.to_bytes(2, "big") + b"\0\0\0\x01" for key in keys))


def window(size: int) -> bytes:
    return frame(4, 0, 0, b"\0\x04" + size.to_bytes(4, "big"))


def shapes() -> dict[str, bytes]:
    """Return the bytes that one connection sends, by attack."""
    small = Encoder()
    plain = b"".join(frame(1, 5, 2 * n + 1, small.encode(_HEAD)) for n in range(500))
    long = Encoder()
    first = frame(1, 5, 1, long.encode([*_HEAD, (b"x-a", b"v" * 3900)]))
    block = long.encode([*_HEAD, *[(b"x-a", b"v" * 3900)] * 15])
    repeated = first + b"".join(frame(1, 5, 2 * n + 1, block) for n in range(1, 500))
    bodies = Encoder()
    parts = []
    for n in range(500):
        head = bodies.encode([*_HEAD, (b"content-length", b"60001")])
        parts.append(frame(1, 4, 2 * n + 1, head))
        parts += [frame(0, 0, 2 * n + 1, b"x" * 15_000)] * 4
    resets = Encoder()
    reset = b"".join(
        frame(1, 5, 2 * n + 1, resets.encode(_HEAD)) + frame(3, 0, 2 * n + 1, b"\0\0\0\x08")
        for n in range(5000)
    )
    sizes = Encoder().encode(_HEAD)
    closed = Encoder()
    asked = b"".join(frame(1, 5, 2 * n + 1, closed.encode(_HEAD)) for n in range(1000))
    post = b"POST /v0/topics/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60001\r\n\r\n"
    return {
        "h1 small requests": b"GET /v0/topics/x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000,
        "h1 half a body of 60 KB": post + b"x" * 60_000,
        "h1 half a head": b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 250,
        "h2 small requests": h2_start() + plain,
        "h2 repeated header of 3.9 KB": h2_start() + repeated,
        "h2 half bodies of 60 KB": h2_start() + b"".join(parts),
        "h2 rapid reset": h2_start() + reset,
        "h2 continuations": h2_start() + frame(1, 0, 1, b"\x82") + frame(9, 0, 1, b"\x84") * 20_000,
        "h2 pings": h2_start() + frame(6, 0, 0, b"penstock") * 20_000,
        "h2 settings": h2_start() + frame(4, 0, 0) * 20_000,
        "h2 settings nobody knows": h2_start()
        + b"".join(settings(range(at, min(at + 2_700, 65_536))) for at in range(16, 65_536, 2_700))
        + settings(range(4, 5)) * 900,
        "h2 sizes of the header table": h2_start()
        + b"".join(frame(1, 5, 2 * n + 1, b"\x20" * 8000 + sizes) for n in range(60)),
        "h2 a window that grows for all": h2_start()
        + window(0)
        + asked
        + b"".join(window(size) for size in range(1, 900)),
        "h2 windows of one byte": h2_start() + frame(8, 0, 0, b"\0\0\0\x01") * 20_000,
    }


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads, in nanoseconds if available, because a shape may take less
    than a tick."""
    try:
        threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
        return sum(int(one.read_text().split()[0]) for one in threads) / 1e9
    except OSError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> int:
    """Send data until the server has read it all or hangs up. Return the bytes sent. Keep the connection
    open."""

    async def drop() -> None:
        while await reader.read(1 << 20):
            pass

    dropping = asyncio.ensure_future(drop())
    sent = 0
    try:
        while sent < len(data) and not dropping.done():
            writer.write(data[sent : sent + 65536])
            await asyncio.wait_for(writer.drain(), 5)
            sent = min(sent + 65536, len(data))
        await asyncio.wait({dropping}, timeout=1)
    except (OSError, TimeoutError):
        pass
    dropping.cancel()
    return max(sent, 1)


def measure(data: bytes) -> tuple[float, float, float]:
    """Return microseconds and bytes of memory per byte, and mebibytes in total."""
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "address"
        environment = {
            **os.environ,
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": str(address),
            "TOPICS_DATA_DIR": f"{folder}/data",
            "TOPICS_API_KEYS": "secret",
            "TOPICS_WAL_SHARDS": "1",
        }
        command = [str(Path(sys.executable).with_name("penstock")), "topics", "serve"]
        server = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 30
            while not address.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not start")
                time.sleep(0.05)
            time.sleep(0.5)
            port = int(address.read_text().rpartition(":")[2])
            with socket.create_connection(
                ("127.0.0.1", port)
            ) as one:  # load everything that the first request loads
                one.sendall(b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                one.recv(1024)
            sent, cpu, grown = asyncio.run(_attacked(port, data, server.pid))
            return cpu / sent * 1e6, grown / sent, grown / 2**20
        finally:
            server.kill()
            server.wait()


async def _attacked(port: int, data: bytes, pid: int) -> tuple[int, float, int]:
    """Return the bytes sent, their CPU seconds, and the server's growth while connections are open.

    The connections are opened before the measurement, because their own cost does not depend on bytes.
    """
    memory = resident(pid)
    wires = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS)]
    await asyncio.sleep(0.3)
    cpu = cpu_s(pid)
    sent = sum(await asyncio.gather(*(send(reader, writer, data) for reader, writer in wires)))
    cpu, grown = cpu_s(pid) - cpu, max(resident(pid) - memory, 0)
    for _, writer in wires:
        writer.close()
    return sent, cpu, grown


def main() -> None:
    rows: list[Row] = []
    found = {what: measure(data) for what, data in shapes().items()}
    for what, (micros, per_byte, mib) in found.items():
        usual = found[f"{what[:2]} small requests"][0]
        rows.append(
            Row(
                section="before a key is shown",
                what=what,
                ours=round(micros, 3),
                unit="us/byte",
                ceiling=round(usual, 3),
                against="a byte of small requests",
                bar=1.25 if "small" not in what else None,
                at_most=True,
                note=f"{what}: {per_byte:.1f} bytes of memory per byte, {mib:.0f} MiB in all",
            )
        )
    print_table(rows)


if __name__ == "__main__":
    main()
