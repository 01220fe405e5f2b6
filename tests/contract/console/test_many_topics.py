"""Ten thousand topics stay fast: the server pages them, and totals need no listing."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from tests.contract.console.conftest import StageProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_ten_thousand_topics_are_listed_page_by_page_without_delay(tmp_path: Path) -> None:
    stage = StageProcess(tmp_path, "--fast", "--topics", "10000", "--keys", "k")
    try:
        headers = {"Authorization": "Bearer k"}
        with httpx.Client(
            base_url=f"{stage.url}/api/", headers=headers, timeout=30, trust_env=False
        ) as client:
            assert client.get("overview").status_code == 200
            page = client.get("topics", params={"prefix": "many-"}).json()
            seen, slowest = 0, 0.0
            for _ in range(60):
                seen += len(page["topics"])
                if page["next"] is None:
                    break
                began = time.monotonic()
                page = client.get("topics", params={"prefix": "many-", "after": page["next"]}).json()
                slowest = max(slowest, time.monotonic() - began)
            assert seen == 10_000
            assert slowest < 5.0
            assert client.get("topics").json()["total"] > 10_000
            began = time.monotonic()
            assert client.get("overview").json()["flow"]["edges"][0]["known"]
            assert time.monotonic() - began < 3.0
    finally:
        stage.close()
