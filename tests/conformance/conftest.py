"""The stores that the conformance kit runs over. Servers start when first needed, once per test process."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests import servers

from penstock.objects import LocalStore, MemoryStore, ObjectStore, StoreConfig, open_store


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        server.make_bucket("kit")
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[servers.S3Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with servers.moto() as server:
        server.make_bucket("kit")
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as endpoint:
        servers.make_azure_container(endpoint, "kit")
        yield endpoint


@pytest.fixture(
    params=["memory", "local", "moto", "seaweedfs", pytest.param("azurite", marks=pytest.mark.azurite)]
)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    opened = _open(request, request.param, tmp_path)
    yield opened
    await opened.close()


def _open(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> ObjectStore:
    if kind == "memory":
        return MemoryStore("kit")
    if kind == "local":
        return LocalStore(tmp_path / "objects")
    if kind == "azurite":
        endpoint = request.getfixturevalue("azurite")
        return open_store(StoreConfig(url="az://kit/below", options=servers.azure_options(endpoint)))
    server: servers.S3Server = request.getfixturevalue(kind)
    return open_store(StoreConfig(url="s3://kit/some/folder", options=server.options()))


@pytest.fixture
def folder() -> str:
    """A folder that no other test uses."""
    return f"t-{uuid.uuid4().hex}"
