"""Delivery into a queue of object storage despite kills: each request exactly once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest
from tests.collector_process import FILE, CollectorProcess, names_in

from penstock.buffer import Consumer, ConsumerConfig
from penstock.collector.receiver_grpc import METHODS
from penstock.otlp.messages import messages_of
from penstock.otlp.schema import Signal

TEXT = FILE[: FILE.index("  out:\n    kind: exporter")] + (
    "  out:\n    kind: exporter\n    plugin_urn: urn:otel:buffer:exporter\n"
    '    config: {store: "file://{{dir}}/queue", format: otlp, batch_compression: none}\n'
    'dead_letters: "{{dir}}/dead"\ndrain_timeout: 20s\n'
)


def request(name: str) -> bytes:
    message = messages_of(Signal.TRACES).request()
    span = message.resource_spans.add().scope_spans.add().spans.add()
    span.name, span.trace_id, span.span_id = name, bytes(15) + b"\x01", bytes(7) + b"\x01"
    return bytes(message.SerializeToString())


async def queued(directory: Path) -> Counter[str]:
    consumer = await Consumer.open(
        ConsumerConfig(
            store=f"file://{directory}/queue",
            manifest_path="telemetry/traces/manifest",
            data_path_prefix="telemetry/traces",
        ),
        last_acked=None,
    )
    found: Counter[str] = Counter()
    while (batch := await consumer.next_batch()) is not None:
        for entry in batch.entries:
            found.update(names_in(bytes(entry), Signal.TRACES))
    await consumer.close()
    return found


@pytest.mark.parametrize("handling", ["pass_through", "arrow"])
def test_a_queue_has_each_request_once_despite_kills(tmp_path: Path, handling: str) -> None:
    rng = random.Random(handling)
    method = next(path for path, signal in METHODS.items() if signal is Signal.TRACES)
    taken: set[str] = set()
    number = 0
    collector = CollectorProcess(tmp_path, TEXT, handling=handling)
    for _ in range(5):
        with collector, grpc.insecure_channel(f"127.0.0.1:{collector.grpc_port}") as channel:
            export = channel.unary_unary(method)
            deadline = time.monotonic() + rng.uniform(0.3, 1.2)
            while time.monotonic() < deadline:
                name = f"span-{number}"
                number += 1
                export(request(name), wait_for_ready=True, timeout=20)
                taken.add(name)
    with collector:
        assert collector.stop() == 0, collector.log
    found = asyncio.run(queued(tmp_path))
    assert {name for name, count in found.items() if count > 1} == set()
    assert taken <= found.keys()
