"""The file of a collector that has none of its own."""

from __future__ import annotations

from penstock.config import Setting
from penstock.up.parts import Layout
from penstock.up.probe import address_of
from penstock.up.settings import CollectorSettings, UpSettings

__all__ = ["collector_mapping"]


def collector_mapping(
    collector: CollectorSettings, settings: UpSettings, layout: Layout
) -> dict[str, Setting]:
    """The file of a collector that keeps what it takes, and puts each signal into a queue of its own."""
    host = collector.host or settings.host
    store = layout.store(collector.store, "queues")
    return {
        "nodes": {
            "otlp": {
                "kind": "receiver",
                "plugin_urn": "urn:otel:otlp:receiver",
                "out_ports": {"out_port": {"destinations": ["keep"]}},
                "config": {
                    "listening_addr": address_of(host, collector.grpc_port),
                    "http_listening_addr": address_of(host, collector.http_port),
                    "tokens": [token.reveal() for token in collector.tokens],
                    "allow_insecure": settings.allow_no_keys,
                    "allowed_hosts": list(settings.allowed_hosts),
                },
            },
            "keep": {
                "kind": "processor",
                "plugin_urn": "urn:otap:processor:persistence",
                "out_ports": {"out_port": {"destinations": ["queues"]}},
                "config": {
                    "path": layout.inner("quiver"),
                    "otlp_handling": "pass_through",
                    "segment": {"max_open_duration": "1s"},
                },
            },
            "queues": {
                "kind": "exporter",
                "plugin_urn": "urn:otel:buffer:exporter",
                "config": {
                    "store": store if "://" in store else f"file://{store}",
                    "manifest_path": "{signal}/manifest",
                    "data_path_prefix": "{signal}",
                    "format": "otlp",
                },
            },
        },
        "telemetry": {"metrics_addr": f"127.0.0.1:{collector.admin_port}"},
        "dead_letters": layout.inner("dead_letters"),
        "drain_timeout": f"{max(1.0, settings.stop_timeout_s / 2):g}s",
    }
