"""The request as nested Arrow in one native call, through ptars and a descriptor of our own.

OTLP's `AnyValue` contains itself, which no Arrow type can. The descriptor here says that arrays and maps are
bytes, which is what they look like on the wire, so they arrive serialized and everything else in columns.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Final, Protocol

import pyarrow as pa

from penstock.otlp.messages import messages_of
from penstock.otlp.signal import Signal

__all__ = ["Handler", "available", "handler_of"]

_OPAQUE: Final = ("array_value", "kvlist_value")


class Handler(Protocol):
    """What of ptars is used."""

    def list_to_record_batch(self, payloads: list[bytes], /) -> pa.RecordBatch:
        """Messages as rows. Raises `ValueError` for bytes that are none."""

    def record_batch_to_array(self, batch: pa.RecordBatch, /) -> pa.Array:
        """Rows as messages."""

    def schema(self) -> pa.Schema:
        """The columns of a message."""


@cache
def available() -> bool:
    """Whether the quick way is installed."""
    return importlib.util.find_spec("ptars") is not None


@cache
def handler_of(signal: Signal) -> Handler:
    """The converter of requests of `signal`."""
    from google.protobuf.descriptor_pool import DescriptorPool
    from ptars import HandlerPool

    pool = DescriptorPool()
    _copy_file(messages_of(signal).request.DESCRIPTOR.file, pool, set())
    slim = pool.FindMessageTypeByName(messages_of(signal).request.DESCRIPTOR.full_name)
    handler: Handler = HandlerPool([slim.file]).get_for_message(slim)
    return handler


def _copy_file(file: object, pool: object, done: set[str]) -> None:
    """Add `file` and what it imports to `pool`, with the fields that make values recursive as bytes."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

    name: str = file.name  # type: ignore[attr-defined]
    if name in done:
        return
    done.add(name)
    for dependency in file.dependencies:  # type: ignore[attr-defined]
        _copy_file(dependency, pool, done)
    copy = FileDescriptorProto()
    file.CopyToProto(copy)  # type: ignore[attr-defined]
    for message in copy.message_type:
        for field in message.field:
            if message.name == "AnyValue" and field.name in _OPAQUE:
                field.type = FieldDescriptorProto.TYPE_BYTES
                field.ClearField("type_name")
    pool.Add(copy)  # type: ignore[attr-defined]
