"""Blocking form of the client, with the same names, for scripts and Spark tasks.

with Client("http://127.0.0.1:4000") as client:
    client.write("clicks", [{"user": 1}])
    for page in client.follow("clicks"):
        ...
"""

from __future__ import annotations

import random

import httpx

from penstock.blocking import BlockingContext, blocking, blocking_iterator, loop_thread
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG
from penstock.topics.client import client as _client
from penstock.topics.client.client import DEFAULT_URL
from penstock.units import DurationLike

__all__ = ["Client"]


class Client(BlockingContext[_client.Client]):
    """Blocking form of `penstock.topics.client.Client`; threads may share it."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | None = None,
        timeout: DurationLike = "30s",
        retry_deadline: DurationLike = "30s",
        mint_keys: bool = True,
        connections_max: int = 64,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        client = _client.Client(
            url,
            key=key,
            timeout=timeout,
            retry_deadline=retry_deadline,
            mint_keys=mint_keys,
            connections_max=connections_max,
            clock=clock,
            rng=rng,
            transport=transport,
        )
        super().__init__(client, loop_thread())

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def url(self) -> str:
        return self._inner.url

    close = blocking(_client.Client.close)

    put_topic = blocking(_client.Client.put_topic)
    state = blocking(_client.Client.state)
    topics = blocking_iterator(_client.Client.topics)
    topics_page = blocking(_client.Client.topics_page)
    remove_topic = blocking(_client.Client.remove_topic)

    write = blocking(_client.Client.write)
    diff = blocking(_client.Client.diff)
    follow = blocking_iterator(_client.Client.follow)
    watch = blocking_iterator(_client.Client.watch)
    delete = blocking(_client.Client.delete)

    claim = blocking(_client.Client.claim)
    work = blocking_iterator(_client.Client.work)
    ack = blocking(_client.Client.ack)
    nack = blocking(_client.Client.nack)
    extend = blocking(_client.Client.extend)

    put_router = blocking(_client.Client.put_router)
    router = blocking(_client.Client.router)
    routers = blocking_iterator(_client.Client.routers)
    remove_router = blocking(_client.Client.remove_router)

    health = blocking(_client.Client.health)
    ready = blocking(_client.Client.ready)
    metrics = blocking(_client.Client.metrics)
    metrics_text = blocking(_client.Client.metrics_text)
