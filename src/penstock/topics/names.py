"""The rules for names of topics and routers, and the topic names in a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Final, TypeAlias

import msgspec
import msgspec.inspect

from penstock.topics.errors import InvalidRequest

TopicName: TypeAlias = Annotated[str, msgspec.Meta(extra={"text": "topic name"})]
"""Request text that names a topic. `names_in` finds it, so that a server checks it against the key."""
FreeText: TypeAlias = Annotated[str, msgspec.Meta(extra={"text": "free"})]
"""Request text that does not name a topic. Every text field of a request has one of these two types."""


_TOPIC: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}", re.ASCII)
_ROUTER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}", re.ASCII)


def is_topic_name(name: str) -> bool:
    """Return whether this is a valid topic name."""
    return _TOPIC.fullmatch(name) is not None


def check_topic_name(name: str) -> str:
    """Return the name. Raise `InvalidRequest` if it is not a valid topic name."""
    if not is_topic_name(name):
        raise InvalidRequest(
            f"{name[:80]!r} is not a topic name: start with a letter or digit, then letters, digits, "
            "'.', '_', ':' or '-', 255 characters at most"
        )
    return name


def check_router_name(name: str) -> str:
    """Return the name. Raise `InvalidRequest` if it is not a valid router name."""
    if _ROUTER.fullmatch(name) is None:
        raise InvalidRequest(
            f"{name[:80]!r} is not a router name: start with a letter or digit, then letters, digits, "
            "'.', '_', ':', '>' or '-', 255 characters at most"
        )
    return name


def names_in(body: msgspec.Struct) -> Iterator[str]:
    """Yield every topic name in a request, at any depth: the fields declared as `TopicName`."""
    for field, find in _finders(type(body)):
        value = getattr(body, field)
        if value is not None:
            yield from find(value)


_Find: TypeAlias = Callable[[object], Iterator[str]]


@lru_cache(maxsize=256)
def _finders(kind: type[msgspec.Struct]) -> tuple[tuple[str, _Find], ...]:
    shown = msgspec.inspect.type_info(kind)
    assert isinstance(shown, msgspec.inspect.StructType)
    found = ((field.name, _finder(field.type)) for field in shown.fields)
    return tuple((name, find) for name, find in found if find is not None)


def _finder(shown: msgspec.inspect.Type) -> _Find | None:
    """Return the function that finds names in a value of this type, or None if it can have none."""
    if isinstance(shown, msgspec.inspect.Metadata):
        return _itself if shown.extra == {"text": "topic name"} else _finder(shown.type)
    if isinstance(shown, msgspec.inspect.StructType):
        return _inside if _finders(shown.cls) else None
    if isinstance(shown, msgspec.inspect.DictType):
        keys, values = _finder(shown.key_type), _finder(shown.value_type)
        if keys is None and values is None:
            return None
        return lambda value: _of_dict(value, keys, values)
    if isinstance(shown, msgspec.inspect.ListType):
        items = _finder(shown.item_type)
        return None if items is None else lambda value: _of_list(value, items)
    if isinstance(shown, msgspec.inspect.UnionType):
        finds = [find for one in shown.types if (find := _finder(one)) is not None]
        assert len(finds) <= 1, "a field is either a name or something else"
        return finds[0] if finds else None
    return None


def _itself(value: object) -> Iterator[str]:
    assert isinstance(value, str)
    yield value


def _inside(value: object) -> Iterator[str]:
    assert isinstance(value, msgspec.Struct)
    return names_in(value)


def _of_dict(value: object, keys: _Find | None, values: _Find | None) -> Iterator[str]:
    assert isinstance(value, dict)
    for key, item in value.items():
        if keys is not None:
            yield from keys(key)
        if values is not None:
            yield from values(item)


def _of_list(value: object, items: _Find) -> Iterator[str]:
    assert isinstance(value, list)
    for item in value:
        yield from items(item)
