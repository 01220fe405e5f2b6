"""Every topic name that a request can carry is known as one, and is checked against the key."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import msgspec
import msgspec.inspect
import pytest

import penstock.servers.topics
from penstock.http.auth import Keyring
from penstock.http.errors import Forbidden
from penstock.topics.config import TopicConfig
from penstock.topics.names import names_in

NAME, FREE = {"text": "topic name"}, {"text": "free"}
CHECKED = {
    "PutBody.dest": "tests/contract/topics/test_key_names.py: a router",
    "PutBody.source": "tests/contract/topics/test_key_names.py: a router",
    "Publish.config.dead_letter": "tests/contract/topics/test_key_names.py: a publish",
    "Publish.topic": "tests/contract/topics/test_key_names.py: a publish",
    "Subscribe.topic": "tests/contract/topics/test_key_names.py: a subscription",
    "Subscribe.topics.key": "tests/contract/topics/test_key_names.py: a subscription",
    "TopicConfig.dead_letter": "tests/contract/topics/test_key_names.py: a config",
    "Unsubscribe.topic": "ends what the connection follows; reads and changes nothing",
    "Unsubscribe.topics.item": "ends what the connection follows; reads and changes nothing",
    "WatchBody.topics.key": "tests/contract/topics/test_key_names.py: a watch",
    "WriteBody.config.dead_letter": "tests/contract/topics/test_key_names.py: a write",
}


def decoded() -> dict[str, msgspec.inspect.StructType]:
    """Every struct that a decoder of the server builds from a request, by its name."""
    found: dict[str, msgspec.inspect.StructType] = {}
    for module in pkgutil.iter_modules(penstock.servers.topics.__path__, "penstock.servers.topics."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, msgspec.json.Decoder):
                for shown in structs(msgspec.inspect.type_info(value.type)):
                    found[shown.cls.__name__.lstrip("_")] = shown
    return found


def structs(shown: msgspec.inspect.Type) -> Iterator[msgspec.inspect.StructType]:
    if isinstance(shown, msgspec.inspect.StructType):
        yield shown
    elif isinstance(shown, msgspec.inspect.UnionType):
        for one in shown.types:
            yield from structs(one)


def texts(shown: msgspec.inspect.Type, path: str) -> Iterator[tuple[str, object]]:
    """Every text in a request, and what it is declared to be."""
    if isinstance(shown, msgspec.inspect.Metadata):
        inner = list(texts(shown.type, path))
        yield from ((path, shown.extra) for _ in inner) if inner else ()
    elif isinstance(shown, msgspec.inspect.StrType):
        yield path, None
    elif isinstance(shown, msgspec.inspect.StructType):
        for field in shown.fields:
            yield from texts(field.type, f"{path}.{field.name}")
    elif isinstance(shown, msgspec.inspect.DictType):
        yield from texts(shown.key_type, f"{path}.key")
        yield from texts(shown.value_type, f"{path}.value")
    elif isinstance(shown, msgspec.inspect.ListType):
        yield from texts(shown.item_type, f"{path}.item")
    elif isinstance(shown, msgspec.inspect.UnionType):
        for one in shown.types:
            yield from texts(one, path)


def all_texts() -> dict[str, object]:
    return {path: declared for name, shown in decoded().items() for path, declared in texts(shown, name)}


def test_the_bodies_of_every_endpoint_are_looked_at() -> None:
    assert {"WriteBody", "TopicConfig", "PutBody", "WatchBody", "Subscribe", "Publish"} <= decoded().keys()


def test_every_text_of_a_request_is_declared_a_topic_name_or_free_text() -> None:
    undeclared = [path for path, declared in all_texts().items() if declared not in (NAME, FREE)]
    assert undeclared == [], "declare these as TopicName or FreeText (penstock.topics.names)"


def test_every_topic_name_of_a_request_has_a_test_that_a_key_does_not_get_around() -> None:
    assert sorted(path for path, declared in all_texts().items() if declared == NAME) == sorted(CHECKED)


def test_names_are_found_at_every_depth() -> None:
    class Body(msgspec.Struct):
        config: TopicConfig | None
        more: list[TopicConfig]
        by: dict[str, TopicConfig]

    one, two, three = (TopicConfig(dead_letter=name) for name in "abc")
    assert list(names_in(Body(one, [two, TopicConfig()], {"x": three}))) == ["a", "b", "c"]
    assert list(names_in(Body(None, [], {}))) == []


def test_a_key_with_a_prefix_covers_all_names_or_none() -> None:
    key = Keyring.parse("k::a").bearer(b"k")
    key.require_names(["a", "ab"])
    with pytest.raises(Forbidden):
        key.require_names(["a", "zz-bank"])
