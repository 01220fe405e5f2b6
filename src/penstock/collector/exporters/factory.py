"""The exporter behind a node's settings. gRPC and HTTP are imported only by those that use them."""

from __future__ import annotations

from penstock.collector.config import NodeSettings
from penstock.collector.exporters.plain import DebugExporter, FlakyExporter, NoopExporter
from penstock.collector.ports import Exporter
from penstock.collector.settings import (
    BufferSettings,
    DebugSettings,
    FileSettings,
    FlakySettings,
    NoopSettings,
    OtlpExporterSettings,
    ParquetSettings,
)
from penstock.errors import Unsupported

__all__ = ["concurrency_of", "make_exporter", "make_otlp_exporter"]


def make_exporter(name: str, settings: NodeSettings) -> Exporter:
    """Not started. Raises `Unsupported` for what is understood and not built."""
    if isinstance(settings, OtlpExporterSettings):
        return make_otlp_exporter(settings)
    if isinstance(settings, BufferSettings):
        from penstock.collector.buffer_export import QueueExporter

        return QueueExporter(settings)
    if isinstance(settings, FileSettings | ParquetSettings):
        return _file(settings)
    if isinstance(settings, DebugSettings):
        return DebugExporter(name, settings)
    if isinstance(settings, NoopSettings):
        return NoopExporter()
    if isinstance(settings, FlakySettings):
        return _flaky(settings)
    raise Unsupported(f"{name}: there is no such exporter")


def concurrency_of(settings: NodeSettings) -> int:
    """How many bundles may be under way to it."""
    return getattr(settings, "concurrency", 1)


def make_otlp_exporter(settings: OtlpExporterSettings) -> Exporter:
    """Over gRPC or HTTP, as its endpoint says."""
    if settings.grpc_endpoint is not None:
        from penstock.collector.exporters.otlp_grpc import OtlpGrpcExporter

        return OtlpGrpcExporter(settings)
    from penstock.collector.exporters.otlp_http import OtlpHttpExporter

    return OtlpHttpExporter(settings)


def _file(settings: FileSettings | ParquetSettings) -> Exporter:
    from penstock.collector.exporters.file import FileExporter

    if isinstance(settings, ParquetSettings):
        return FileExporter(settings.path, "parquet", spark=settings.spark)
    return FileExporter(settings.path, settings.format)


def _flaky(settings: FlakySettings) -> Exporter:
    if settings.path is None:
        return FlakyExporter(settings, NoopExporter())
    from penstock.collector.exporters.file import FileExporter

    return FlakyExporter(settings, FileExporter(settings.path, "otlp"))
