"""OTLP's JSON encoding: the protobuf mapping, but with ids in hexadecimal and enums as numbers."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidInput
from penstock.jsontext import check_json
from penstock.otlp.limits import check_json_density
from penstock.otlp.messages import messages_of, parse
from penstock.otlp.schema import Signal

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue


def json_of(serialized: bytes) -> str:
    """Return a serialized `AnyValue` as JSON: arrays as arrays, maps as objects, bytes in base64."""
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


_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})
_NO_IDS_BELOW: Final = frozenset(
    {"attributes", "resource", "scope", "body", "filteredAttributes", "filtered_attributes", "metadata"}
)
"""The objects whose keys are user data, even if they have the name of a protocol field."""


def from_json(data: bytes, signal: Signal) -> bytes:
    """Convert a request in JSON to protobuf. Ignore unknown fields.

    Raise `InvalidInput` for bytes that are not a request, and `LimitExceeded` for too many values. Ids of a
    wrong length are kept: `decode` refuses only their items.
    """
    from google.protobuf.json_format import ParseDict, ParseError

    check_json_density(data)
    check_json(data)
    message = messages_of(signal).request()
    try:
        tree = json.loads(data)
        if not isinstance(tree, dict):
            raise InvalidInput(f"the body must be a JSON object, not a {type(tree).__name__}")
        _map_ids(tree, _hex_to_base64)
        ParseDict(tree, message, ignore_unknown_fields=True)
        return bytes(message.SerializeToString())
    except (ParseError, ValueError, TypeError, RecursionError, AttributeError) as error:
        raise InvalidInput(
            f"the body is not an {message.DESCRIPTOR.name} in JSON: {str(error).splitlines()[0][:300]}"
        ) from error


def to_json(data: bytes, signal: Signal) -> bytes:
    """Convert a request in protobuf to JSON. Raise `InvalidInput`."""
    from google.protobuf.json_format import MessageToDict

    tree = MessageToDict(parse(data, signal), use_integers_for_enums=True)
    _map_ids(tree, _base64_to_hex)
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()


def _map_ids(node: object, change: Callable[[str, str], str]) -> None:
    """Change every id below `node` in place."""
    if isinstance(node, list):
        for each in node:
            _map_ids(each, change)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name in _IDS and isinstance(value, str):
                node[name] = change(name, value)
            elif name not in _NO_IDS_BELOW and isinstance(value, (dict, list)):
                _map_ids(value, change)


def _hex_to_base64(name: str, text: str) -> str:
    try:
        return base64.b64encode(binascii.unhexlify(text)).decode("ascii")
    except ValueError as error:
        raise InvalidInput(f"{name}: {text[:40]!r} is not hexadecimal") from error


def _base64_to_hex(name: str, text: str) -> str:
    return base64.b64decode(text).hex()
