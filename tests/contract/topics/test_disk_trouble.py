"""A disk that accepts no writes: the probe reports it, and no response reveals where the data is."""

from __future__ import annotations

import resource
from pathlib import Path

from tests.contract.topics_server import serving


def test_ready_is_503_while_no_write_succeeds_and_200_again_after_that(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        api, pid = server.api(), server.process.pid
        api.put("t", durable=True)
        api.write("t", 1)
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, limits[1]))
        try:
            written = api.client.post("/v0/topics/t", json={"records": [{"data": 2}]})
            assert written.status_code in (500, 503)
            for _ in range(2):
                ready = api.client.get("/v0/ready")
                assert ready.status_code == 503
                assert "no write succeeds" in ready.json()["error"]["message"]
            for answer in (written, ready):
                assert str(tmp_path) not in answer.text
                assert "a file of the server" in answer.text
            assert api.client.get("/v0/health").status_code == 200
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        assert api.client.get("/v0/ready").status_code == 200
        assert api.write("t", 3)["first_seq"] == 2
