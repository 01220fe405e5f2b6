"""The HTTP API without HTTP: it parses JSON requests and encodes JSON responses.

Names are lowerCamelCase. Requests with unknown names or a wrong structure are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import msgspec

from penstock.errors import InvalidInput
from penstock.jsontext import check_json
from penstock.vector.delta import Write
from penstock.vector.filters import Filter, parse_filter
from penstock.vector.index import Recall
from penstock.vector.model import VECTOR_FIELD, Hit, Hits, Scalar, Vector

_T = TypeVar("_T")
_Attribute: TypeAlias = str | int | float | bool | list[float]
_ENCODE: Final = msgspec.json.Encoder().encode
_NUMBER_BYTES: Final = 32
_QUOTE_BYTES: Final = 16
_OBJECT_BYTES: Final = 256
_SEARCH_NUMBER_BYTES: Final = 64
"""Limit for one number. A 64-bit float has up to 25 characters, and some clients indent each on its own
line."""
_FILTER_BYTES: Final = 1024**2
_RECALL: Final = ("sample", "k", "nprobe")


class _Vector(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    attributes: dict[str, _Attribute]


class _Write(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    upsert_vectors: list[_Vector]


class _Delete(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    ids: list[str]


class _Search(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    vector: list[float]
    k: int = 10
    nprobe: int | None = None
    filter: object = None
    include_fields: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """A search request. Its fields are the arguments of `VectorStore.search`."""

    vector: list[float]
    k: int
    nprobe: int | None
    filter: Filter | None
    include_fields: list[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallRequest:
    """A request to measure recall. Its fields are arguments of `VectorStore.recall`."""

    sample: int = 100
    k: int = 10
    nprobe: int | None = None


def decoded_size(body: bytes) -> int:
    """Estimate the memory needed to parse a body, including the body, from its punctuation."""
    return (
        len(body)
        + _NUMBER_BYTES * body.count(b",")
        + _QUOTE_BYTES * body.count(b'"')
        + _OBJECT_BYTES * body.count(b"{")
    )


def search_bytes_max(dimensions: int) -> int:
    """Return the maximum size of a search body: a vector with these dimensions and a long filter."""
    return _SEARCH_NUMBER_BYTES * dimensions + _FILTER_BYTES


def parse_write(body: bytes) -> Write:
    """Parse the vectors of a write. Raises `InvalidInput`."""
    parsed = _parsed(body, _WRITES)
    return Write.upsert([_vector(one) for one in parsed.upsert_vectors])


def parse_delete(body: bytes) -> Write:
    """Parse the ids of a deletion. Raises `InvalidInput`."""
    return Write.delete(_parsed(body, _DELETES).ids)


def parse_search(body: bytes) -> SearchRequest:
    """Parse a search request. Raises `InvalidInput`."""
    parsed = _parsed(body, _SEARCHES)
    return SearchRequest(
        vector=parsed.vector,
        k=parsed.k,
        nprobe=parsed.nprobe,
        filter=None if parsed.filter is None else parse_filter(parsed.filter),
        include_fields=parsed.include_fields,
    )


def parse_recall(query: Mapping[str, str]) -> RecallRequest:
    """Parse a recall request. Raises `InvalidInput`."""
    if unknown := sorted(query.keys() - _RECALL):
        raise InvalidInput(f"{unknown[0][:80]!r} is not a parameter; expected one of {', '.join(_RECALL)}")
    try:
        return RecallRequest(**{name: int(text) for name, text in query.items()})
    except ValueError:
        raise InvalidInput(f"{', '.join(_RECALL)} must be whole numbers") from None


def upserted_answer(count: int) -> bytes:
    return _ENCODE({"status": "success", "vectorsUpserted": count})


def deleted_answer(count: int) -> bytes:
    return _ENCODE({"status": "success", "vectorsDeleted": count})


def search_answer(hits: Hits) -> bytes:
    """Encode the results, with `warnings` for results that were left out."""
    results = [{"score": hit.score, "vector": {"id": hit.id, "attributes": _attributes(hit)}} for hit in hits]
    answer: dict[str, object] = {"status": "success", "results": results}
    if hits.damaged:
        answer["warnings"] = [
            f"{name!r} is left out: its record is damaged. Write it again" for name in hits.damaged
        ]
    return _ENCODE(answer)


def recall_answer(measured: Recall) -> bytes:
    return _ENCODE(
        {
            "status": "success",
            "recall": measured.recall,
            "k": measured.k,
            "sample": measured.sample,
            "vectors": measured.vectors,
        }
    )


def vector_answer(vector: Vector) -> bytes:
    return _ENCODE({"status": "success", "vector": {"id": vector.id, "attributes": _attributes(vector)}})


def error_answer(message: str) -> bytes:
    return _ENCODE({"status": "error", "message": message})


def _vector(one: _Vector) -> Vector:
    attributes: dict[str, Scalar] = {}
    embedding = None
    for name, value in one.attributes.items():
        if name == VECTOR_FIELD:
            if not isinstance(value, list):
                raise InvalidInput(f"{one.id[:80]!r}: {VECTOR_FIELD} must be a list of numbers")
            embedding = value
        elif isinstance(value, list):
            raise InvalidInput(
                f"{one.id[:80]!r}: attribute {name[:80]!r} is a list; only {VECTOR_FIELD!r} may be one"
            )
        else:
            attributes[name] = value
    if embedding is None:
        raise InvalidInput(f"{one.id[:80]!r} has no attribute {VECTOR_FIELD!r}")
    return Vector(one.id, embedding, attributes)


def _attributes(of: Hit | Vector) -> dict[str, object]:
    attributes: dict[str, object] = dict(of.attributes)
    if of.vector is not None:
        attributes[VECTOR_FIELD] = of.vector.tolist()
    return attributes


_WRITES: Final = msgspec.json.Decoder(_Write)
_DELETES: Final = msgspec.json.Decoder(_Delete)
_SEARCHES: Final = msgspec.json.Decoder(_Search)


def _parsed(body: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    check_json(body)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is invalid: {error}") from None
