"""`penstock topics router` and the client's calls for routers, over a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.cli_runner import penstock
from tests.process.topics_server import KEY, Server, serving

from penstock.topics import (
    IncompatibleTopic,
    Predicate,
    RouterConfig,
    RouterCycle,
    RouterNotFound,
    TopicNotFound,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "data") as running:
        yield running


def test_a_router_is_made_shown_listed_and_deleted(server: Server) -> None:
    made = server.json("router", "put", "big", "orders", "orders.big", "--tag", "big*", "--drop-node")
    assert made["created"] is True
    assert _config(made)["filter"] == ["tag", "Glob", "big*"]
    server.run("write", "orders", "--tag", "bigger", given=b"1\n2\n")
    server.run("write", "orders", "--tag", "small", given=b"3\n")
    shown = server.json("router", "stat", "big")
    assert shown["forwarded_total"] == 2
    assert _config(shown)["filter"] == ["tag", "Glob", "big*"]
    told = server.run("router", "stat", "big")
    assert b"big*" in told
    assert b"tag" in told
    assert b"orders.big" in server.run("router", "ls", "--source", "orders")
    assert server.json("router", "ls", "--dest", "elsewhere") == {"routers": []}
    assert b"changed big" in server.run("router", "put", "big", "orders", "orders.big")
    server.run("router", "put", "big", "orders", "other", code=2)
    server.run("router", "put", "back", "orders.big", "orders", code=2)
    server.run("router", "put", "new", "orders", "missing", "--no-create", code=2)
    server.run(
        "router", "put", "back", "orders.big", "orders", "--allow-cycle", "--exactly-once", "--drop-tag"
    )
    assert server.run("router", "delete", "back").strip() == b"removed back"
    assert server.json("router", "delete", "back")["deleted"] is False
    told_error = _error(server, "router", "stat", "back")
    assert b"`penstock topics router ls`" in told_error


def test_a_cycle_is_refused_with_the_option_that_allows_it(server: Server) -> None:
    server.run("router", "put", "there", "a", "b")
    assert b"--allow-cycle" in _error(server, "router", "put", "back", "b", "a")


def _config(told: dict[str, object]) -> dict[str, object]:
    config = told["config"]
    assert isinstance(config, dict)
    return config


def _error(server: Server, *arguments: str) -> bytes:
    return penstock("topics", *arguments, "--url", server.url, "--key", KEY, code=2).stderr


def test_a_client_has_routers(server: Server) -> None:
    with server.client() as client:
        config = RouterConfig(
            source="a",
            dest="b",
            preserve_tag=False,
            filter=Predicate(value="x", is_prefix=True),
            guarantee="exactly_once",
        )
        assert client.put_router("a->b", config).created
        client.write("a", [{"n": 1}], tag="xy")
        state = client.router("a->b")
        assert (state.config, state.forwarded_total) == (config, 1)
        (record,) = client.diff("b").records()
        assert json.loads(bytes(record.meta or b""))["_topics_router"]["source_seq"] == 1
        client.put_router("a->c", RouterConfig(source="a", dest="c"))
        assert [summary.router for summary in client.routers(page_size=1)] == ["a->b", "a->c"]
        assert [summary.dest for summary in client.routers("a", source="a", dest="c")] == ["c"]
        with pytest.raises(RouterCycle) as cycle:
            client.put_router("c->a", RouterConfig(source="c", dest="a"))
        assert cycle.value.detail == {"cycle": ["c", "a", "c"]}
        with pytest.raises(IncompatibleTopic):
            client.put_router("d->b", RouterConfig(source="d", dest="b"))
        with pytest.raises(TopicNotFound):
            client.put_router("a->e", RouterConfig(source="a", dest="e", create_dest=False))
        assert client.remove_router("a->c").deleted
        with pytest.raises(RouterNotFound):
            client.router("a->c")
        assert client.remove_topic("a").routers_removed == ("a->b",)
