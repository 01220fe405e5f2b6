"""gRPC over TLS, from our exporter to our receiver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.collector_doubles import MemoryStore

from penstock.collector.consumers import RawConsumer
from penstock.collector.limiter import ReceiverLimiter
from penstock.collector.otlp_exporters import OtlpGrpcExporter
from penstock.collector.outcome import Verdict
from penstock.collector.payload import RawPayload
from penstock.collector.receiver_grpc import GrpcReceiver
from penstock.collector.settings import Address, OtlpExporterSettings, OtlpReceiverSettings, TlsSettings
from penstock.errors import ConfigError
from penstock.metrics import Registry
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry


@pytest.fixture
def tls(tmp_path: Path) -> TlsSettings:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([openssl, *command.split(), *names], check=True, capture_output=True)
    return TlsSettings(cert_file=str(cert), key_file=str(key))


async def test_a_receiver_with_a_certificate_serves_clients_that_trust_it(tls: TlsSettings) -> None:
    store = MemoryStore()
    limiter = ReceiverLimiter("in", RawConsumer(store), registry=Registry())
    receiver = GrpcReceiver(limiter, request_bytes_max=1_000_000, tls=tls)
    bound = await receiver.bind(Address("127.0.0.1", 0))
    payload = RawPayload(telemetry(Signal.LOGS, items=1), Signal.LOGS)
    verdicts = []
    for scheme, ca_file in (("https", tls.cert_file), ("http", None)):
        exporter = OtlpGrpcExporter(
            OtlpExporterSettings(
                grpc_endpoint=f"{scheme}://localhost:{bound.port}",
                tls=TlsSettings(ca_file=ca_file),
                timeout="5s",
            )
        )
        await exporter.start()
        verdicts.append((await exporter.send(payload)).verdict)
        await exporter.close()
    await receiver.drain(1)
    assert verdicts == [Verdict.ACK, Verdict.RETRY]
    assert len(store.stored) == 1


async def test_a_certificate_that_cannot_be_read_is_a_mistake_in_the_file(tls: TlsSettings) -> None:
    limiter = ReceiverLimiter("in", RawConsumer(MemoryStore()), registry=Registry())
    gone = TlsSettings(cert_file=tls.cert_file, key_file="/nowhere/key.pem")
    with pytest.raises(ConfigError, match=r"cannot read /nowhere/key\.pem"):
        await GrpcReceiver(limiter, request_bytes_max=1000, tls=gone).bind(Address("127.0.0.1", 0))


def test_a_certificate_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="cert_file and key_file"):
        OtlpReceiverSettings(tls=TlsSettings(cert_file="cert.pem"))
