"""The complete collector in one process, over a real Quiver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from tests.collector_doubles import GrpcBackend

from penstock import otlp
from penstock.collector import Collector, parse_plan
from penstock.collector.receiver_grpc import METHODS
from penstock.errors import ConfigError, Unavailable
from penstock.metrics import Registry
from penstock.otlp.schema import Signal
from penstock.quiver.errors import AtCapacity, Locked
from penstock.testing.otlp_kit import telemetry

PATHS = {signal: method for method, signal in METHODS.items()}


def plan_of(
    directory: Path, destinations: list[str], keep: dict[str, Any] | None, **exporters: dict[str, Any]
) -> dict[str, Any]:
    def node(kind: str, urn: str, config: dict[str, Any], to: list[str] | None = None) -> dict[str, Any]:
        ports = {"out_ports": {"out_port": {"destinations": to}}} if to else {}
        return {"kind": kind, "plugin_urn": urn, "config": config, **ports}

    receiver = {"listening_addr": "127.0.0.1:0", "http_listening_addr": "127.0.0.1:0"}
    nodes = {
        "in": node("receiver", "urn:otel:otlp:receiver", receiver, destinations if keep is None else ["keep"])
    }
    if keep is not None:
        config = {
            "path": str(directory / "quiver"),
            "segment": {"max_open_duration": "50ms"},
            "wal": {"flush_interval": "1ms"},
            "retry": {"initial": "50ms", "max": "100ms"},
            "retention": {"min_free": 0},
            **keep,
        }
        nodes["keep"] = node("processor", "urn:otap:processor:persistence", config, destinations)
    for name, config in exporters.items():
        config = dict(config)
        nodes[name] = node("exporter", f"urn:otel:{config.pop('plugin')}:exporter", config)
    return {
        "nodes": nodes,
        "dead_letters": str(directory / "dead"),
        "telemetry": {"metrics_addr": "127.0.0.1:0"},
        "drain_timeout": "5s",
    }


def collector(loaded: dict[str, Any], registry: Registry | None = None) -> Collector:
    return Collector(
        parse_plan(yaml.safe_load(yaml.safe_dump(loaded)), {}, where="test"), registry=registry or Registry()
    )


async def send(made: Collector, signal: Signal, count: int, items: int = 3) -> None:
    async with grpc.aio.insecure_channel(str(made.addresses["in"][0])) as channel:
        for number in range(count):
            await channel.unary_unary(PATHS[signal])(telemetry(signal, items=items, seed=number))


def items_in(directory: Path) -> int:
    files = list(directory.rglob("*.pb"))
    return sum(otlp.count_items(file.read_bytes(), Signal(file.parent.name)) for file in files)


@pytest.mark.parametrize("handling", ["arrow", "pass_through"])
async def test_all_accepted_data_is_delivered_before_a_stop_ends(tmp_path: Path, handling: str) -> None:
    files = {"plugin": "file", "path": str(tmp_path / "files")}
    async with collector(plan_of(tmp_path, ["files"], {"otlp_handling": handling}, files=files)) as made:
        for signal in Signal:
            await send(made, signal, 5)
    assert items_in(tmp_path / "files") >= 3 * 5 * 3
    assert not (tmp_path / "dead").exists()


async def test_every_destination_gets_all_data(tmp_path: Path) -> None:
    exporters = {name: {"plugin": "file", "path": str(tmp_path / name)} for name in ("a", "b")}
    async with collector(plan_of(tmp_path, ["a", "b"], {}, **exporters)) as made:
        await send(made, Signal.LOGS, 6)
    assert items_in(tmp_path / "a") == items_in(tmp_path / "b") == 18


async def test_a_shared_subscription_is_split_among_the_destinations(tmp_path: Path) -> None:
    exporters = {name: {"plugin": "file", "path": str(tmp_path / name)} for name in ("a", "b")}
    loaded = plan_of(tmp_path, ["a", "b"], {"subscription": "shared"}, **exporters)
    async with collector(loaded) as made:
        await send(made, Signal.LOGS, 10)
    assert items_in(tmp_path / "a") > 0
    assert items_in(tmp_path / "b") > 0
    assert items_in(tmp_path / "a") + items_in(tmp_path / "b") == 30


async def test_without_persistence_the_response_is_that_of_the_destination(tmp_path: Path) -> None:
    async with GrpcBackend() as backend:
        out = {"plugin": "otlp", "grpc_endpoint": f"127.0.0.1:{backend.port}"}
        async with collector(plan_of(tmp_path, ["out"], None, out=out)) as made:
            await send(made, Signal.METRICS, 2)
            assert len(backend.requests) == 2
            body = telemetry(Signal.LOGS, items=1)
            url = f"http://{made.addresses['in'][1]}/v1/logs"
            headers = {"content-type": "application/x-protobuf"}
            async with httpx.AsyncClient() as client:
                assert (await client.post(url, content=body, headers=headers)).status_code == 200
                assert len(backend.requests) == 3
                await backend.stop()
                refused = await client.post(url, content=body, headers=headers)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_a_destination_that_joins_later_gets_the_backlog(tmp_path: Path) -> None:
    down = {"plugin": "otlp", "grpc_endpoint": "127.0.0.1:1", "probe": {"initial": "50ms", "max": "50ms"}}
    async with collector(plan_of(tmp_path, ["down"], {}, down=down)) as made:
        await send(made, Signal.LOGS, 4)
    files = {"plugin": "file", "path": str(tmp_path / "files")}
    async with collector(plan_of(tmp_path, ["down", "files"], {}, down=down, files=files)):
        pass
    assert items_in(tmp_path / "files") == 12


async def test_operators_see_health_readiness_and_metrics(tmp_path: Path) -> None:
    loaded = plan_of(tmp_path, ["out"], {}, out={"plugin": "noop"})
    async with (
        collector(loaded) as made,
        httpx.AsyncClient(base_url=f"http://{made.addresses['telemetry'][0]}") as client,
    ):
        await send(made, Signal.LOGS, 1)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).text == "ready\n"
        text = (await client.get("/metrics")).text
        assert 'collector_receiver_requests{receiver="in",signal="logs",result="taken"} 1' in text
        assert "quiver_core_bytes" in text
        assert (await client.get("/what")).status_code == 404
        assert (await client.post("/metrics")).status_code == 405


async def test_a_full_store_makes_clients_wait_and_loses_nothing(tmp_path: Path) -> None:
    """A destination is down and the cap is reached soon: clients get UNAVAILABLE, and accepted data stays."""
    small = {
        "otlp_handling": "pass_through",
        "segment": {"max_open_duration": "50ms", "target_size": "100KB"},
        "wal": {"max_size": "200KB", "flush_interval": "1ms"},
        "retention": {"size_cap": "600KB", "min_free": 0},
    }
    taken = 0
    async with GrpcBackend() as backend:
        out = {"plugin": "otlp", "grpc_endpoint": "127.0.0.1:1", "probe": {"initial": "50ms", "max": "50ms"}}
        async with collector(plan_of(tmp_path, ["out"], small, out=out)) as made:
            refused: grpc.aio.AioRpcError | None = None
            while refused is None:
                try:
                    await send(made, Signal.LOGS, 1, items=20)
                    taken += 1
                except grpc.aio.AioRpcError as error:
                    refused = error
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert any(key == "google.rpc.retryinfo-bin" for key, _ in refused.trailing_metadata() or ())
        assert taken > 5
        out["grpc_endpoint"] = f"127.0.0.1:{backend.port}"
        async with collector(plan_of(tmp_path, ["out"], small, out=out)):
            while sum(otlp.count_items(data, Signal.LOGS) for _, data in backend.requests) < 20 * taken:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_two_collectors_cannot_share_a_directory(tmp_path: Path) -> None:
    loaded = plan_of(tmp_path, ["out"], {}, out={"plugin": "noop"})
    async with collector(loaded):
        with pytest.raises(Locked):
            async with collector(loaded):
                pass
    async with collector(loaded):
        pass


async def test_a_port_in_use_fails_the_start_and_releases_everything(tmp_path: Path) -> None:
    loaded = plan_of(tmp_path, ["out"], {}, out={"plugin": "noop"})
    async with collector(loaded) as made:
        other = plan_of(tmp_path / "other", ["out"], {}, out={"plugin": "noop"})
        other["nodes"]["in"]["config"] = {"http_listening_addr": str(made.addresses["in"][1])}
        with pytest.raises(Unavailable, match="cannot listen"):
            async with collector(other):
                pass
        other["nodes"]["in"]["config"] = {"http_listening_addr": "127.0.0.1:0"}
        async with collector(other):
            pass


async def test_a_cap_that_cannot_hold_a_log_and_two_segments_is_refused(tmp_path: Path) -> None:
    loaded = plan_of(tmp_path, ["out"], {"retention": {"size_cap": "1MB"}}, out={"plugin": "noop"})
    with pytest.raises(ConfigError, match="size_cap must be at least"):
        async with collector(loaded):
            pass


async def test_the_sdk_waits_for_the_requested_delay(tmp_path: Path) -> None:
    """The collector requests three seconds, which is longer than the SDK's own delay."""
    times: list[float] = []
    loaded = plan_of(tmp_path, ["out"], {"otlp_handling": "pass_through"}, out={"plugin": "noop"})
    async with collector(loaded) as made:
        store = made._pipelines["keep"].quiver
        keep = store.ingest_raw
        loop = asyncio.get_running_loop()

        async def full_once(data: bytes, signal: str) -> object:
            times.append(loop.time())
            if len(times) == 1:
                raise AtCapacity("full", retry_after_s=3)
            return await keep(data, signal)

        store.ingest_raw = full_once  # type: ignore[method-assign]

        def one_span() -> None:
            tracing = TracerProvider()
            tracing.add_span_processor(
                SimpleSpanProcessor(OTLPSpanExporter(f"http://{made.addresses['in'][0]}"))
            )
            tracing.get_tracer("t").start_span("one").end()
            tracing.shutdown()

        await asyncio.to_thread(one_span)
    assert 2.9 <= times[1] - times[0] < 6


@pytest.fixture(autouse=True)
def quiet_sdk() -> Iterator[None]:
    """Ignore the warnings that the SDK emits indefinitelyy retry."""
    logger = logging.getLogger("opentelemetry")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


async def test_a_hurried_stop_returns_bundles_in_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(data: bytes, signal: Signal, context: grpc.aio.ServicerContext) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with GrpcBackend(never) as backend:
        out = {"plugin": "otlp", "grpc_endpoint": f"127.0.0.1:{backend.port}", "timeout": "60s"}
        loaded = plan_of(tmp_path, ["out"], {}, out=out) | {"drain_timeout": "60s"}
        made = collector(loaded)
        await made.start()
        await send(made, Signal.LOGS, 3)
        stopping = asyncio.create_task(made.stop())
        while not backend.metadata:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not stopping.done()
        made.hurry()
        with caplog.at_level(logging.WARNING):
            await asyncio.wait_for(stopping, 10)
        assert "out: segments kept until the next start: " in caplog.text
    files = {"plugin": "file", "path": str(tmp_path / "files")}
    async with collector(plan_of(tmp_path, ["out"], {}, out=files)):
        pass
    assert items_in(tmp_path / "files") == 9
