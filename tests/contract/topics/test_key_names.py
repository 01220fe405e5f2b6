"""A key with a prefix reaches no other topic, through any field of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.contract.socket_client import opened
from tests.contract.topics_server import PROTOCOLS, Api, Server, fresh_name, serving

BANK = "zz-bank"
TO_BANK = {"type": "queue", "dead_letter": BANK, "max_deliveries": 1}
RECORDS = [{"data": 1}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("names") / "data"
    with serving(data, key="root", TOPICS_API_KEYS="root,narrow::a") as running:
        running.api(key="root").ask("PUT", f"/v0/topics/{BANK}", {}, status=201)
        yield running


@pytest.fixture(params=PROTOCOLS)
def narrow(request: pytest.FixtureRequest, server: Server) -> Api:
    return server.api(request.param, key="narrow")


def mine() -> str:
    return "a" + fresh_name()


def test_a_config_cannot_name_a_dead_letter_topic_outside_the_key(narrow: Api, server: Server) -> None:
    name = mine()
    refused = narrow.refused("PUT", f"/v0/topics/{name}", TO_BANK, status=403)
    assert (refused["code"], refused["detail"]) == ("forbidden", {"topic": BANK})
    narrow.refused("GET", f"/v0/topics/{name}", status=404)
    narrow.ask("PUT", f"/v0/topics/{name}", {**TO_BANK, "dead_letter": "a-letters"}, status=201)
    narrow.refused("PUT", f"/v0/topics/{name}", TO_BANK, status=403)
    assert server.api(key="root").ask("GET", f"/v0/topics/{BANK}")["head_seq"] == 0


def test_a_write_cannot_have_a_config_that_names_one(narrow: Api) -> None:
    name = mine()
    body = {"records": RECORDS, "config": TO_BANK}
    assert narrow.refused("POST", f"/v0/topics/{name}", body, status=403)["detail"] == {"topic": BANK}
    narrow.put(name, type="queue")
    assert narrow.refused("POST", f"/v0/topics/{name}", body, status=403)["detail"] == {"topic": BANK}


def test_a_narrow_key_uses_a_queue_whose_dead_letters_a_wider_key_configured(
    narrow: Api, server: Server
) -> None:
    name, letters = mine(), f"zz-{fresh_name()}"
    root = server.api(key="root")
    root.ask("PUT", f"/v0/topics/{name}", {**TO_BANK, "dead_letter": letters}, status=201)
    narrow.write(name, 1)
    assert narrow.ask("POST", f"/v0/topics/{name}/claim", {"node": "w"})["count"] == 1
    narrow.ask("POST", f"/v0/topics/{name}/nack", {"node": "w", "seqs": [1]})
    assert narrow.ask("POST", f"/v0/topics/{name}/claim", {"node": "w"})["count"] == 0
    assert root.ask("GET", f"/v0/topics/{letters}")["count"] == 1


@pytest.mark.parametrize("ends", [("a1", BANK), (BANK, "a1")])
def test_a_router_cannot_have_an_end_outside_the_key(narrow: Api, ends: tuple[str, str]) -> None:
    body = {"source": ends[0], "dest": ends[1]}
    assert narrow.refused("PUT", f"/v0/routers/{mine()}", body, status=403)["detail"] == {"topic": BANK}


def test_a_router_that_leads_outside_the_key_is_not_described_to_it(narrow: Api, server: Server) -> None:
    name, secret = mine(), f"zz-{fresh_name()}"
    server.api(key="root").ask("PUT", f"/v0/routers/{name}", {"source": "a1", "dest": secret}, status=201)
    body = {"source": "a1", "dest": "a2"}
    for method, sent in (("PUT", body), ("GET", None), ("DELETE", None)):
        refused = narrow.refused(method, f"/v0/routers/{name}", sent, status=403)
        assert refused["message"] == "this key does not cover that name"
        assert secret not in str(refused)


def test_a_cycle_outside_the_key_is_refused_without_its_names(narrow: Api, server: Server) -> None:
    first, last, secret = mine(), mine(), f"zz-{fresh_name()}"
    root = server.api(key="root")
    root.ask("PUT", f"/v0/routers/{mine()}", {"source": last, "dest": secret}, status=201)
    root.ask("PUT", f"/v0/routers/{mine()}", {"source": secret, "dest": first}, status=201)
    refused = narrow.refused("PUT", f"/v0/routers/{mine()}", {"source": first, "dest": last}, status=409)
    assert refused["code"] == "router_cycle"
    assert secret not in str(refused)


def test_a_destination_with_a_source_outside_the_key_is_refused_without_its_name(
    narrow: Api, server: Server
) -> None:
    dest, secret = mine(), f"zz-{fresh_name()}"
    server.api(key="root").ask("PUT", f"/v0/routers/{mine()}", {"source": secret, "dest": dest}, status=201)
    refused = narrow.refused("PUT", f"/v0/routers/{mine()}", {"source": mine(), "dest": dest}, status=409)
    assert refused["detail"] == {"topic": dest, "reason": "router_dest_fan_in"}
    assert secret not in str(refused)


def test_names_that_a_key_covers_are_in_the_errors_of_routers(narrow: Api) -> None:
    first, last = mine(), mine()
    narrow.ask("PUT", f"/v0/routers/{mine()}", {"source": first, "dest": last}, status=201)
    refused = narrow.refused("PUT", f"/v0/routers/{mine()}", {"source": last, "dest": first}, status=409)
    assert refused["detail"] == {"cycle": [last, first, last]}
    refused = narrow.refused("PUT", f"/v0/routers/{mine()}", {"source": mine(), "dest": last}, status=409)
    assert first in refused["message"]


def test_a_watch_cannot_name_a_topic_outside_the_key(narrow: Api) -> None:
    refused = narrow.refused("POST", "/v0/watch", {"topics": {BANK: {}}}, status=403)
    assert refused["detail"] == {"topic": BANK}


@pytest.mark.parametrize(
    "command",
    [
        {"op": "publish", "topic": BANK, "records": RECORDS},
        {"op": "publish", "topic": "a-new", "records": RECORDS, "config": TO_BANK},
        {"op": "subscribe", "topic": BANK},
        {"op": "subscribe", "topics": {BANK: {}}},
    ],
)
async def test_no_command_of_a_websocket_names_a_topic_outside_the_key(
    server: Server, command: dict[str, Any]
) -> None:
    async with opened(server, "narrow") as socket:
        assert (await socket.refused(**command))["code"] == "forbidden"
    assert server.api(key="root").ask("GET", f"/v0/topics/{BANK}")["head_seq"] == 0
