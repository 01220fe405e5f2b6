"""A Prometheus and a server of ours that hold the same generated series, for all tests that ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.peers.generated import bodies
from tests.peers.peer import Peer, penstock, prometheus


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peer, Peer]]:
    """Prometheus first. Both were sent the very same bytes."""
    folder = tmp_path_factory.mktemp("peers")
    with prometheus(folder / "prometheus", "global: {}\n") as theirs, penstock(folder / "penstock") as ours:
        for body in bodies():
            theirs.write(body)
            ours.write(body)
        yield theirs, ours
