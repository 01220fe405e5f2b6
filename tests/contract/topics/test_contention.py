"""Many clients use one name concurrently: every response is one that the contract allows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.contract.topics_server import PROTOCOLS, serving


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_topic_created_and_deleted_under_load_fails_no_request(tmp_path: Path, protocol: str) -> None:
    with serving(tmp_path / "data", TOPICS_SEGMENT_MAX_EVENTS="10") as server:
        clients = [
            httpx.AsyncClient(
                base_url=server.url,
                http1=protocol == "h1",
                http2=protocol == "h2",
                timeout=30,
                trust_env=False,
            )
            for _ in range(8)
        ]
        seen: Counter[tuple[str, int]] = Counter()
        await asyncio.gather(*(disturb(client, place, seen) for place, client in enumerate(clients)))
        for client in clients:
            await client.aclose()
        assert all(status in KNOWN[move] for move, status in seen), seen
        assert {move for move, _ in seen} == KNOWN.keys()
        left = server.api().ask("GET", "/v0/topics")["topics"]
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()
    with serving(tmp_path / "data") as server:
        now = server.api().ask("GET", "/v0/topics")["topics"]
        for one in (*left, *now):
            del one["effective_priority"]
        assert now == left


KNOWN = {
    "put": {200, 201, 409},
    "write": {200, 201},
    "keyed": {200, 201},
    "remove": {200, 409},
    "poll": {200, 404},
    "delete": {200, 404},
    "state": {200, 404},
}


async def disturb(client: httpx.AsyncClient, place: int, seen: Counter[tuple[str, int]]) -> None:
    rng = random.Random(place)
    for _ in range(60):
        move = rng.choice(sorted(KNOWN))
        answer = await ask(client, rng, move)
        seen[move, answer.status_code] += 1
        body = answer.json()
        assert ("error" in body) is (answer.status_code >= 400)
        if move in ("write", "keyed"):
            assert body["last_seq"] - body["first_seq"] + 1 == body["count"]


async def ask(client: httpx.AsyncClient, rng: random.Random, move: str) -> httpx.Response:
    path = f"/v0/topics/{rng.choice('ab')}"
    records: list[dict[str, Any]] = [{"data": "x" * 50, "tag": rng.choice("pq")} for _ in range(3)]
    if move == "put":
        config = {"type": rng.choice(["log", "log", "queue"]), "durability": rng.choice(["disk", "fsync"])}
        return await client.put(path, json={**config, "cap_records": rng.choice([0, 5])})
    if move in ("write", "keyed"):
        key = rng.choice("kl") if move == "keyed" else None
        return await client.post(path, json={"records": records, "idempotency_key": key})
    if move == "remove":
        return await client.delete(path, params={"if_empty": rng.choice(["true", "false"])})
    if move == "poll":
        return await client.post(f"{path}/diff", json={"wait_ms": 30, "from_seq": rng.choice([0, 5, 100])})
    if move == "delete":
        return await client.post(f"{path}/delete", json={"match": rng.choice("pq")})
    return await client.get(path)
