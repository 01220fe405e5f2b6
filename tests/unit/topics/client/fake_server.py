"""A topics server that answers from a script, without a socket."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

import httpx

from penstock.topics.client import Client

Step: TypeAlias = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]

WRITTEN = {
    "topic": "t",
    "first_seq": 1,
    "last_seq": 1,
    "head_seq": 1,
    "count": 1,
    "created": False,
    "deduped": False,
    "performance": {"server_total_ms": 0.1, "wal_append_ms": 0.5, "fsync_ms": 0.25},
}


def answer(body: object, status: int = 200, **headers: str) -> httpx.Response:
    return httpx.Response(status, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


def refusal(status: int, code: str, detail: object = None, **headers: str) -> httpx.Response:
    problem = {"code": code, "message": f"because of {code}"} | ({} if detail is None else {"detail": detail})
    return answer({"error": problem}, status, **headers)


def page(
    records: list[dict[str, object]], next_from_seq: int, head_seq: int, **more: object
) -> httpx.Response:
    body = {
        "topic": "t",
        "records": records,
        "next_from_seq": next_from_seq,
        "head_seq": head_seq,
        "earliest_seq": 1,
        "tombstone": None,
        "lag": head_seq - next_from_seq,
    }
    return answer(body | more)


class SteppingClock:
    """A clock that advances only in sleeps and steps, and records every sleep."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def now_ms(self) -> int:
        return 1_700_000_000_000 + int(self.now_s * 1000)

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class FakeServer:
    """A server that plays the steps, one per request. Health is answered separately, from `started_s`."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.requests: list[httpx.Request] = []
        self.clock = SteppingClock()
        self.started_s = -3600.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v0/health":
            up_ms = int((self.clock.now_s - self.started_s) * 1000)
            return answer({"status": "ok", "version": "0.1.0", "uptime_ms": up_ms})
        self.requests.append(request)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, httpx.Response) else step(request)

    def client(self, **options: object) -> Client:
        return Client(
            "http://there:4000",
            transport=httpx.MockTransport(self),
            clock=self.clock,
            **options,  # type: ignore[arg-type]
        )

    def body(self, number: int = -1) -> dict[str, object]:
        found = json.loads(self.requests[number].content)
        assert isinstance(found, dict)
        return found
