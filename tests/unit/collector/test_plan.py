"""A complete file: the proposal's example runs unchanged, and mistakes are reported with a location."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from penstock.cli.collector import run
from penstock.collector.config import parse_plan
from penstock.collector.settings import OtlpExporterSettings, OtlpReceiverSettings
from penstock.config import Secret
from penstock.errors import ConfigError

EXAMPLE = """
nodes:
  otlp_receiver:
    kind: receiver
    plugin_urn: "urn:otel:otlp:receiver"
    out_ports:
      out_port:
        destinations:
          - persistence
        dispatch_strategy: round_robin
    config:
      listening_addr: "127.0.0.1:4317"
      response_stream_channel_size: 256 # Required: channel buffer capacity (number of messages)

  otap_receiver:
    kind: receiver
    plugin_urn: "urn:otel:otap:receiver"
    out_ports:
      out_port:
        destinations:
          - persistence
        dispatch_strategy: round_robin
    config:
      listening_addr: "127.0.0.1:4318"
      response_stream_channel_size: 256 # Required: channel buffer capacity (number of messages)

  persistence:
    kind: processor
    plugin_urn: "urn:otap:processor:persistence"
    out_ports:
      out_port:
        destinations:
          - otap_exporter
          - otlp_exporter
        dispatch_strategy: round_robin
    config:
      path: ./quiver_data  # Platform-appropriate persistent storage location
      segment:
        target_size: 32MB
      wal:
        max_size: 4GB
        flush_interval: 25ms
      retention:
        max_retain_after_ingestion_hours: 72
        size_cap: 500GB
        size_cap_policy: drop_oldest  # or backpressure

  otap_exporter:
    kind: exporter
    plugin_urn: "urn:otel:otap:exporter"
    config:
      grpc_endpoint: "http://{{backend_hostname}}:1235"
      compression_method: zstd
      arrow:
        payload_compression: none
  otlp_exporter:
    kind: exporter
    plugin_urn: "urn:otel:otlp:exporter"
    config:
      grpc_endpoint: "http://127.0.0.1:4318"
      # timeout: "15s"  # Optional: timeout for RPC requests
"""
HOST = {"backend_hostname": "backend"}


def example() -> dict[str, Any]:
    return copy.deepcopy(yaml.safe_load(EXAMPLE))


def test_the_example_runs_unchanged_and_reports_the_nodes_it_leaves_out() -> None:
    plan = parse_plan(example(), HOST, where="file")
    assert set(plan.graph.nodes) == {"otlp_receiver", "persistence", "otlp_exporter"}
    settings = plan.persistence(plan.graph.nodes["persistence"])
    assert settings.quiver.wal.max_bytes == 4_000_000_000
    assert not settings.is_raw
    receiver = plan.settings["otlp_receiver"]
    assert isinstance(receiver, OtlpReceiverSettings)
    assert [str(address) for address in receiver.addresses] == ["127.0.0.1:4317"]
    warnings = "\n".join(plan.warnings())
    assert "otap_receiver: the otap receiver is not implemented" in warnings
    assert "otap_exporter: the otap exporter is not implemented" in warnings
    assert (
        "otlp_exporter: sends to http://127.0.0.1:4318, where otap_receiver of the same file listens"
        in warnings
    )


def test_defaults_of_an_otlp_exporter_are_those_of_the_protocol() -> None:
    exporter = parse_plan(example(), HOST, where="file").settings["otlp_exporter"]
    assert isinstance(exporter, OtlpExporterSettings)
    assert (exporter.timeout_s, exporter.concurrency, exporter.request_bytes_max) == (15, 5, 64 * 1024**2)
    assert (exporter.response_bytes_max, exporter.compression_method) == (4 * 1024**2, "gzip")


def test_a_receiver_without_addresses_listens_on_both_ports_of_the_protocol() -> None:
    addresses = [str(address) for address in OtlpReceiverSettings().addresses]
    assert addresses == ["127.0.0.1:4317", "127.0.0.1:4318"]


def change(path: str, value: object) -> dict[str, Any]:
    loaded = example()
    node: Any = loaded
    keys = path.split("/")
    for key in keys[:-1]:
        node = node.setdefault(key, {})
    node[keys[-1]] = value
    return loaded


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("nodes/persistence/config/wal/flush_intervall", "1s", "did you mean 'flush_interval'"),
        ("nodes/persistence/config/validaton", "full", "validaton: unknown key"),
        ("nodes/persistence/config/segment/target_size", "many", "is not a size"),
        ("nodes/otlp_exporter/config/timout", "1s", "did you mean 'timeout'"),
        (
            "nodes/otlp_exporter/config/http_endpoint",
            "http://x",
            "either grpc_endpoint or http_endpoint",
        ),
        ("nodes/otlp_receiver/config/listening_addr", "0.0.0.0:4317", "there are no tokens"),
        ("nodes/otlp_receiver/config/listening_addr", "4317", "is not an address"),
        ("nodes/otap_exporter/config/arow", {}, "did you mean 'arrow'"),
        ("nodes/otlp_receiver/plugin_urn", "urn:otel:otlp:exporter", "kind is receiver"),
        ("telemetry/metric_addr", "x", "did you mean 'metrics_addr'"),
        ("cores", 0, "at least 1"),
        ("drain_timeout", "-1s", "^file.*is not a duration"),
        ("nodes/otlp_receiver/config/max_in_flight_bytes", "lots", "is not a size"),
        *(
            (
                "nodes/otlp_exporter",
                {"kind": "exporter", "plugin_urn": f"urn:otel:{name}:exporter", "config": config},
                "concurrency must be a whole number of at least 1",
            )
            for name, config in (
                ("file", {"path": "x", "concurrency": 0}),
                ("parquet", {"path": "x", "concurrency": 0}),
                ("noop", {"concurrency": 0}),
                ("flaky", {"concurrency": -1}),
            )
        ),
        ("nods", {}, "did you mean 'nodes'"),
    ],
)
def test_a_mistake_is_reported_with_its_location(path: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_plan(change(path, value), HOST, where="file")


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="backend_hostname"):
        parse_plan(example(), {}, where="file")


def test_a_public_address_is_accepted_with_tokens_or_allow_insecure() -> None:
    OtlpReceiverSettings(listening_addr="0.0.0.0:4317", tokens=(Secret("s"),))
    OtlpReceiverSettings(listening_addr="0.0.0.0:4317", allow_insecure=True)


def test_two_nodes_cannot_share_a_directory_or_a_port() -> None:
    loaded = example()
    loaded["nodes"]["second"] = copy.deepcopy(loaded["nodes"]["persistence"])
    loaded["nodes"]["otlp_receiver"]["out_ports"]["out_port"]["destinations"].append("second")
    with pytest.raises(ConfigError, match="persistence and second both use"):
        parse_plan(loaded, HOST, where="file")


def test_dotted_keys_are_read_as_nested_ones() -> None:
    loaded = change("nodes/persistence/config", {"path": "x", "retention.size_cap": "20GB"})
    plan = parse_plan(loaded, HOST, where="file")
    settings = plan.persistence(plan.graph.nodes["persistence"])
    assert settings.quiver.retention.cap_bytes == 20_000_000_000


def test_check_reports_the_nodes_that_would_run(tmp_path: Path) -> None:
    file = tmp_path / "collector.yaml"
    file.write_text(EXAMPLE)
    result = CliRunner().invoke(run, [str(file), "--check", "--set", "backend_hostname=b"])
    assert result.exit_code == 0
    assert "persistence: persistence processor -> otlp_exporter" in result.output
    assert "warning: otap_exporter" in result.output


def test_secrets_are_masked() -> None:
    loaded = change("nodes/otlp_exporter/config/headers", {"authorization": "Bearer s3cret"})
    assert "s3cret" not in repr(parse_plan(loaded, HOST, where="file"))
