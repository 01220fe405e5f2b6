"""Looking at a part over HTTP: its numbers, and a request passed through to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import httpx

from penstock.console.asker import ANSWER_BYTES_MAX, Asker
from penstock.console.exposition import Exposition
from penstock.errors import LimitExceeded, PermissionDenied, Unavailable

__all__ = ["HttpSource"]

_TIMEOUT_S: Final = 2.5
"""Shorter than a watcher waits, so that the error says who was silent."""


class HttpSource:
    """One part with an address, which may change when it is started again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._url: str | None = None
        self._key: str | None = None
        self._asker: Asker | None = None
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)

    def move(self, url: str | None, key: str | None) -> None:
        """Where the part is from now on."""
        if (url, key) == (self._url, self._key):
            return
        self._url, self._key = url, key
        if self._asker is not None:
            self._asker.close()
        self._asker = None if url is None else Asker(self._name, url, key, timeout_s=_TIMEOUT_S)

    async def close(self) -> None:
        if self._asker is not None:
            self._asker.close()
        await self._http.aclose()

    async def look(self) -> Exposition:
        """Its `/metrics`. Raises `Unavailable`, `PermissionDenied`, `LimitExceeded`."""
        if self._asker is None:
            raise self._absent
        answer = await self._asker.ask("/metrics", accept="text/plain")
        text = answer.body.decode("utf-8", "replace")
        self._check(answer.status, text)
        return Exposition(text)

    async def pass_on(
        self, path: str, *, body: bytes, kind: str, timeout_s: float
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """The part's own answer to a POST, whatever it says. Raises `Unavailable`, `LimitExceeded`."""
        allowed = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        headers = {**allowed, "Content-Type": kind, "Accept": "application/json"}
        async with self._http.stream(
            "POST", f"{self._address}{path}", content=body, headers=headers, timeout=timeout_s
        ) as answer:
            pieces, size = [], 0
            async for piece in answer.aiter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size > ANSWER_BYTES_MAX:
                    raise LimitExceeded(
                        f"the answer of {self._name} is above {ANSWER_BYTES_MAX >> 20} MiB; ask for less"
                    )
        return answer.status_code, b"".join(pieces), answer.headers

    @property
    def _address(self) -> str:
        if self._url is None:
            raise self._absent
        return self._url.rstrip("/")

    @property
    def _absent(self) -> Unavailable:
        return Unavailable(f"{self._name} is not running, or has no address yet")

    def _check(self, status: int, text: str) -> None:
        if status in (401, 403):
            raise PermissionDenied(f"{self._name} refuses the console's key ({status})")
        if status != 200:
            raise Unavailable(f"{self._name} answers {status}: {text.strip()[:200]}")
