"""One server per session for all tests that need no settings of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.topics_server import PROTOCOLS, Api, Server, fresh_name, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("contract") / "data", TOPICS_WAL_SHARDS="2") as running:
        yield running


@pytest.fixture(scope="session")
def h1(server: Server) -> Api:
    return server.api("h1")


@pytest.fixture(scope="session", params=PROTOCOLS)
def api(request: pytest.FixtureRequest, server: Server) -> Api:
    """The API over HTTP/1.1 and over cleartext HTTP/2 with prior knowledge."""
    return server.api(request.param)


@pytest.fixture
def topic() -> str:
    """Return an unused name of a topic that does not exist."""
    return fresh_name()
