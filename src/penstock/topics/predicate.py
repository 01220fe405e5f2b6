"""Which tags a request means, as clients spell it."""

from __future__ import annotations

from penstock.topics.errors import InvalidRequest
from penstock.topics.model import Predicate

__all__ = ["canonical", "matches", "parse_match"]

_FORMS = '["tag","Eq",value], ["tag","Glob","prefix*"] or a bare string'


def parse_match(value: object) -> Predicate:
    """The predicate in a decoded JSON value. Raises `InvalidRequest` when it is none."""
    if isinstance(value, str):
        return Predicate(value=value[:-1], is_prefix=True) if value.endswith("*") else Predicate(value=value)
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not isinstance(value[2], str):
        raise InvalidRequest(f"a predicate is {_FORMS}")
    field, operator, text = value
    if field != "tag":
        raise InvalidRequest(f"only the tag can be matched; a predicate is {_FORMS}")
    if operator == "Eq":
        return Predicate(value=text)
    if operator != "Glob":
        raise InvalidRequest(f"the operator is neither Eq nor Glob; a predicate is {_FORMS}")
    if not text.endswith("*"):
        raise InvalidRequest("a Glob ends in '*'; what stands before it is taken literally")
    return Predicate(value=text[:-1], is_prefix=True)


def canonical(predicate: Predicate) -> tuple[str, str, str]:
    """The predicate as it is shown to clients."""
    if predicate.is_prefix:
        return ("tag", "Glob", predicate.value + "*")
    return ("tag", "Eq", predicate.value)


def matches(predicate: Predicate, tag: str | None) -> bool:
    """Whether a record with this tag is meant; one without a tag never is."""
    if tag is None:
        return False
    return tag.startswith(predicate.value) if predicate.is_prefix else tag == predicate.value
