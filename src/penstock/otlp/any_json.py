"""Arrays and maps of OTLP as plain JSON, for people and for SQL."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

__all__ = ["json_of"]


def json_of(serialized: bytes) -> str:
    """The JSON of a serialized `AnyValue`: arrays as arrays, maps as objects, bytes in base64."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    try:
        value = AnyValue.FromString(serialized)
    except DecodeError:
        return base64.b64encode(serialized).decode("ascii")
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))


def _plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _plain(pair.value) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode("ascii")
    found: object = getattr(value, kind)
    return found
