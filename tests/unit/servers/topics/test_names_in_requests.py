"""Every topic name in a request is declared as one, and is checked against the key."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

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


UNTYPED = {
    "DeleteBody.match": "a predicate over nodes and tags",
    "DiffBody.match": "a predicate over nodes and tags",
    "PutBody.filter": "a predicate over nodes and tags",
    "Subscribe.match": "a predicate over nodes and tags",
    "WatchBody.match": "a predicate over nodes and tags",
    "Known.request_id": "comes back as it was sent",
    "Ping.request_id": "comes back as it was sent",
    "Publish.request_id": "comes back as it was sent",
    "Subscribe.request_id": "comes back as it was sent",
    "Unsubscribe.request_id": "comes back as it was sent",
}
"""Fields that hold any JSON, except records, which are not inspected."""
DECODED_ELSEWHERE = {("answers.py", "_Cursor"): "a page of a list, which is filtered by the key"}
QUERIES = {
    "cursor": "a page of a list, which is filtered by the key",
    "dest": "a list, which is filtered by the key",
    "if_empty": "a flag",
    "lease_ms": "a number",
    "lenient": "a flag",
    "max": "a number",
    "node": "the name of a client",
    "page_size": "a number",
    "prefix": "a list, which is filtered by the key",
    "return_seqs": "a flag",
    "source": "a list, which is filtered by the key",
    "touch": "a flag",
}
SOURCES = sorted(Path(penstock.servers.topics.__path__[0]).rglob("*.py"))


def decoded() -> dict[str, msgspec.inspect.StructType]:
    """Return every struct that a decoder of the server builds from a request, by name."""
    found: dict[str, msgspec.inspect.StructType] = {}
    for module in pkgutil.walk_packages(penstock.servers.topics.__path__, "penstock.servers.topics."):
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
    """Return every text field in a request, with its declared type."""
    if isinstance(shown, msgspec.inspect.Metadata):
        inner = list(texts(shown.type, path))
        yield from ((path, shown.extra) for _ in inner) if inner else ()
    elif isinstance(shown, msgspec.inspect.StrType):
        yield path, None
    elif isinstance(shown, msgspec.inspect.AnyType | msgspec.inspect.RawType | msgspec.inspect.CustomType):
        yield path, "anything"
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


def test_the_bodies_of_every_endpoint_are_covered() -> None:
    assert {"WriteBody", "TopicConfig", "PutBody", "WatchBody", "Subscribe", "Publish"} <= decoded().keys()


def test_every_text_of_a_request_is_declared_a_topic_name_or_free_text() -> None:
    undeclared = [path for path, declared in all_texts().items() if declared not in (NAME, FREE, "anything")]
    assert undeclared == [], "declare these as TopicName or FreeText (penstock.topics.names)"


def test_every_topic_name_of_a_request_has_a_test_of_key_prefixes() -> None:
    assert sorted(path for path, declared in all_texts().items() if declared == NAME) == sorted(CHECKED)


def test_no_field_accepts_any_json_unless_it_cannot_name_a_topic() -> None:
    untyped = {path for path, declared in all_texts().items() if declared == "anything"}
    assert {path for path in untyped if ".records.item." not in path} == UNTYPED.keys()


def calls(source: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_every_request_is_decoded_by_a_decoder_of_its_module() -> None:
    """A decoder at module level is found; one created in a function would be missed."""
    found, made = set(), 0
    for source in SOURCES:
        for function, call in calls(source):
            if function in ("msgspec.json.decode", "msgspec.convert", "json.loads"):
                kinds = [ast.unparse(one.value) for one in call.keywords if one.arg == "type"]
                found.add((source.name, *kinds))
            made += function.startswith("msgspec.json.Decoder")
    assert found == DECODED_ELSEWHERE.keys()
    modules = [importlib.import_module(f"penstock.servers.topics.{one.stem}") for one in SOURCES]
    known = [value for module in modules for value in vars(module).values()]
    assert made == sum(isinstance(value, msgspec.json.Decoder) for value in known)


def test_every_parameter_of_a_query_is_known() -> None:
    found = set()
    for source in SOURCES:
        for function, call in calls(source):
            if function.endswith(("query.get", "query().get")):
                arguments = call.args[:1]
            else:
                arguments = call.args[1:2] if function.endswith(("query_flag", "query_number")) else []
            found.update(one.value for one in arguments if isinstance(one, ast.Constant))
    assert found == QUERIES.keys()


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
