"""Telemetry as rows: a record is one OTLP request, or an Arrow stream of the flat columns of its signal.

The collector's buffer exporter writes either. They cannot be taken for each other: an Arrow stream begins
with four bytes `ff`, which no request does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from penstock.otlp import Signal

__all__ = ["otlp_columns", "otlp_table"]

_STREAM: Final = b"\xff\xff\xff\xff"


def otlp_columns(signal: str) -> StructType:
    """The columns of `signal`, as `penstock.otlp.views` has them."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from penstock.otlp import Signal, view_schema

    columns: StructType = from_arrow_schema(view_schema(Signal(signal)))
    return columns


def otlp_table(record: pa.Buffer, signal: str) -> pa.Table:
    """The rows of a record.

    Raises `InvalidInput` for one that is no telemetry of `signal`. One that holds items which are refused is
    refused whole: as a bad record it is kept.
    """
    from penstock.otlp import Signal, view

    data, kind = record.to_pybytes(), Signal(signal)
    batches = _from_stream(record, kind) if data.startswith(_STREAM) else [_from_request(data, kind)]
    return pa.Table.from_batches([view(batch) for batch in batches])


def _from_request(data: bytes, signal: Signal) -> pa.RecordBatch:
    from penstock.otlp import decode

    decoded = decode(data, signal)
    if decoded.rejected:
        raise InvalidInput(decoded.message)
    return decoded.batch


def _from_stream(record: pa.Buffer, signal: Signal) -> list[pa.RecordBatch]:
    from penstock.otlp import schema_of

    with pa.ipc.open_stream(record) as stream:
        batches = list(stream)
        wanted = schema_of(signal)
        if not wanted.equals(stream.schema.remove_metadata()):
            missing = [name for name in wanted.names if name not in stream.schema.names]
            raise InvalidInput(
                f"the columns are not those of {signal}: "
                + (f"there is no {missing[0]}" if missing else "their types differ")
            )
    return batches or [pa.RecordBatch.from_pylist([], schema=wanted)]
