"""Calls over HTTP: one pool of connections, and one rule for retries."""

from __future__ import annotations

import asyncio
import enum
import random
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import httpx
import msgspec

from penstock.clock import Clock
from penstock.errors import ConfigError, PenstockError
from penstock.retry import Backoff, RetryPolicy
from penstock.topics.client.errors import (
    Effect,
    Failure,
    Unanswered,
    UnexpectedAnswer,
    failure_of_answer,
    failure_of_transport,
)
from penstock.topics.client.models import Health


class Lanes(httpx.AsyncBaseTransport):
    """Up to `count` keep-alive connections. A call takes the most recently used one.

    The usual pool scans all its connections for every call. With thirty concurrent calls, this costs more
    than the call itself. Here each connection is its own pool, and a response is read fully before the
    connection is returned. A connection whose call failed or was cancelled is not used again, because its
    pool may still count that call.
    """

    def __init__(self, *, trusted: ssl.SSLContext, count: int) -> None:
        self._trusted = trusted
        self._room = asyncio.Semaphore(count)
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._lanes: list[httpx.AsyncHTTPTransport] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._enter(request)
        try:
            lane = self._idle.pop() if self._idle else self._add()
            try:
                response = await lane.handle_async_request(request)
                try:
                    await response.aread()
                finally:
                    await response.aclose()
            except BaseException:
                self._give_up(lane)
                raise
            self._idle.append(lane)
        finally:
            self._room.release()
        return response

    async def aclose(self) -> None:
        for lane in self._lanes:
            await lane.aclose()
        while self._closing:
            await asyncio.wait(self._closing)

    def _give_up(self, lane: httpx.AsyncHTTPTransport) -> None:
        self._lanes.remove(lane)
        task = asyncio.get_running_loop().create_task(lane.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _enter(self, request: httpx.Request) -> None:
        timeouts = request.extensions.get("timeout", {})
        try:
            async with asyncio.timeout(timeouts.get("pool")):
                await self._room.acquire()
        except TimeoutError as error:
            raise httpx.PoolTimeout("all connections are busy", request=request) from error

    def _add(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        lane = httpx.AsyncHTTPTransport(verify=self._trusted, limits=limits)
        self._lanes.append(lane)
        return lane


CONNECT_S_MAX: Final = 5.0
_OK: Final = frozenset({200, 201})
_HEALTH: Final = msgspec.json.Decoder(Health)


class Repeat(enum.Enum):
    """When a call may be sent again."""

    ALWAYS = "it changes nothing"
    KEYED = "it carries an idempotency key that the server remembers until it restarts"
    UNAPPLIED = "only while it is certain that the server did not act on it"
    NEVER = "a probe: the first answer is the answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, which can be sent repeatedly."""

    method: str
    path: str
    repeat: Repeat
    topic: str | None = None
    body: bytes | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    """How long the server was asked to delay the response. Added to the timeout."""

    @property
    def changes(self) -> bool:
        return self.repeat in (Repeat.KEYED, Repeat.UNAPPLIED)


class Connection:
    """A pool of connections to one server. The key is only in its headers."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        timeout_s: float,
        policy: RetryPolicy,
        connections_max: int,
        clock: Clock,
        rng: random.Random,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.url = _checked_url(url)
        self._timeout_s = timeout_s
        self._policy = policy
        self._given = transport
        self._clock = clock
        self._rng = rng
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=_headers(key),
            transport=transport or _transport(self.url, connections_max),
            follow_redirects=False,
            trust_env=False,
        )

    @property
    def policy(self) -> RetryPolicy:
        return self._policy

    @property
    def timeout_s(self) -> float:
        """Return how long one attempt may take."""
        return self._timeout_s

    def streaming(self) -> httpx.AsyncClient:
        """Return a client for endless responses. The caller closes it."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers=self._http.headers,
            transport=self._given or httpx.AsyncHTTPTransport(verify=_trusted(self.url)),
            follow_redirects=False,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, call: Call) -> httpx.Response:
        """Send a call and return its successful response. Raise the error of the last attempt.

        If any attempt of a changing call may have been applied, the call ends with a response or with
        `Unanswered`. It never raises an error that suggests sending it again.
        """
        backoff = Backoff(self._policy, clock=self._clock, rng=self._rng)
        started = self._clock.monotonic()
        unsettled: Failure | None = None
        while True:
            outcome = await self._attempt(call, started, unsettled)
            if isinstance(outcome, httpx.Response):
                return outcome
            if outcome.effect is Effect.UNKNOWN and call.changes:
                unsettled = outcome
            if not _may_repeat(call, outcome) or not await self._pause(backoff, outcome, started):
                raise _final_error(outcome, unsettled)

    async def _attempt(
        self, call: Call, started: float, unsettled: Failure | None
    ) -> httpx.Response | Failure:
        if unsettled is not None:
            obstacle = await self._same_server(started)
            if obstacle is not None:
                return obstacle
        return await self._once(call)

    async def _once(self, call: Call) -> httpx.Response | Failure:
        timeout = httpx.Timeout(
            self._timeout_s,
            connect=min(self._timeout_s, CONNECT_S_MAX),
            read=self._timeout_s + call.wait_s,
        )
        headers = dict(call.headers) | ({"Content-Type": "application/json"} if call.body else {})
        try:
            response = await self._http.request(
                call.method,
                call.path,
                content=call.body,
                params=call.query or None,
                headers=headers,
                timeout=timeout,
            )
        except httpx.HTTPError as error:
            return failure_of_transport(error, self.url, changes=call.changes)
        if response.status_code in _OK:
            return response
        return failure_of_answer(response, call.topic, changes=call.changes)

    async def _same_server(self, started: float) -> Failure | None:
        """Return None if the responding server has been up since before the first attempt.

        Idempotency keys are in the server's memory. 1. An attempt is applied and its response is lost. 2. The
        server restarts and recovers the record, but not the key. 3. Repeating the attempt would add a second
        record. So before each repetition the server's uptime is checked.
        """
        outcome = await self._once(Call(method="GET", path="/v0/health", repeat=Repeat.NEVER))
        if isinstance(outcome, Failure):
            return outcome
        try:
            up_s = _HEALTH.decode(outcome.content).uptime_ms / 1000
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return Failure(
                error=UnexpectedAnswer(f"{self.url}/v0/health does not report the server's uptime"),
                effect=Effect.REFUSED,
            )
        if up_s > self._clock.monotonic() - started:
            return None
        text = f"{self.url} was restarted during a call, which may have been applied"
        return Failure(error=Unanswered(text), effect=Effect.REFUSED)

    async def _pause(self, backoff: Backoff, failure: Failure, started: float) -> bool:
        """Wait as long as the server asks, plus a backoff. Return False if the deadline does not allow it."""
        if failure.retry_after_s > 0:
            if self._clock.monotonic() - started + failure.retry_after_s >= self._policy.deadline_s:
                return False
            await self._clock.sleep(failure.retry_after_s)
        return await backoff.pause()


def _may_repeat(call: Call, failure: Failure) -> bool:
    if call.repeat is Repeat.NEVER or failure.effect is Effect.REFUSED:
        return False
    return failure.effect is Effect.NONE or call.repeat is not Repeat.UNAPPLIED


def _final_error(failure: Failure, unsettled: Failure | None) -> PenstockError:
    """Return the error to raise. A later refusal to connect does not settle an earlier attempt."""
    if unsettled is None or failure is unsettled:
        return failure.error
    if isinstance(failure.error, Unanswered):
        return failure.error
    text = f"{unsettled.error}; since then: {failure.error}"
    final = Unanswered(text)
    final.__cause__ = failure.error
    return final


def _checked_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the address of a topics server is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
        raise ConfigError(
            f"{parsed.copy_with(userinfo=b'')} is not the address of a topics server: "
            "write http://host:port, and give the key separately"
        )
    return str(parsed).rstrip("/")


def _headers(key: str | None) -> dict[str, str]:
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "penstock"}
    if key is not None:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            # Do not show the key: it is a secret even if it is invalid.
            raise ConfigError("the key must be one word of printable ASCII")
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _transport(url: str, connections_max: int) -> Lanes:
    return Lanes(trusted=_trusted(url), count=connections_max)


def _trusted(url: str) -> ssl.SSLContext:
    # Loading the machine's certificates takes longer than a call. Without TLS none is needed, and a context
    # that trusts no certificate is a safe placeholder.
    https = url.startswith("https:")
    return ssl.create_default_context() if https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
