"""Batching of small concurrent requests before they are decoded into columns.

Setting up the columns of a batch costs as much as about two hundred rows. While one group is decoded and made
durable, the next one accumulates, so no request waits for others to arrive.

Requests are joined as bytes: two concatenated messages have the fields of both. This is only true if each
message ends where its last field ends, which `check_framing` verifies by looking at the outermost fields.
Other errors are found when the group is decoded. Then each request is decoded alone, and only the invalid
ones are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from penstock.errors import InvalidInput, LimitExceeded, PenstockError, Rejected
from penstock.otlp import Signal
from penstock.protowire import LENGTH_DELIMITED, fields

RESOURCES_MAX: Final = 100_000
"""The maximum number of resources. Counting the fields of a larger request would delay all others."""

_LOGGER = logging.getLogger(__name__)
_GROUP_BYTES_MAX: Final = 1024**2
_Waiting: TypeAlias = tuple[bytes, "asyncio.Future[Reply]"]


def check_framing(data: bytes) -> int:
    """Count the resources of a serialized export request (field 1, of any signal).

    The cost is one step per resource, because the contents of fields are not inspected. Raise `InvalidInput`
    unless the bytes are a whole number of well-formed fields, and `LimitExceeded` for more than
    `RESOURCES_MAX`.
    """
    count = resources = 0
    try:
        for number, wire_type, _, _ in fields(data):
            count += 1
            if count > RESOURCES_MAX:
                raise LimitExceeded(
                    f"the request has more than {RESOURCES_MAX} resources; send fewer per request"
                )
            if number == 1:
                if wire_type != LENGTH_DELIMITED:
                    raise InvalidInput("its first field is not a message")
                resources += 1
    except InvalidInput as error:
        raise InvalidInput(f"this is not an OTLP request: {error}") from error
    return resources


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of an accepted request: the number of refused items, and the reason."""

    rejected: int = 0
    message: str = ""


TAKEN: Final = Reply()
"""The reply to a request that was accepted completely."""


class Mixed(Rejected):
    """Some items of a group must be refused. Decoding its requests separately shows which ones."""


class Take(Protocol):
    """A callback that stores one request or several joined ones, and returns when they are durable."""

    async def __call__(self, data: bytes, signal: Signal, *, alone: bool) -> Reply:
        """Store the data. Raise `Rejected` without storing anything if it is refused as a whole.

        Raise `Mixed` if the data is several requests and some of their items must be refused.
        """
        ...


class RequestBatcher:
    """Passes requests to `take` in groups, and returns the result of its own request to each sender."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._waiting: dict[Signal, deque[_Waiting]] = {signal: deque() for signal in Signal}
        self._runners: dict[Signal, asyncio.Task[None]] = {}

    async def add(self, data: bytes, signal: Signal) -> Reply:
        """Return the reply to one request. Raise the error of decoding or storing it."""
        check_framing(data)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[signal].append((data, answer))
        if signal not in self._runners:
            self._runners[signal] = asyncio.create_task(self._run(signal))
        return await answer

    async def _run(self, signal: Signal) -> None:
        try:
            while self._waiting[signal]:
                await self._settle(self._group(signal), signal)
        finally:
            del self._runners[signal]

    def _group(self, signal: Signal) -> list[_Waiting]:
        waiting, size = self._waiting[signal], 0
        group: list[_Waiting] = []
        while waiting and (not group or size + len(waiting[0][0]) <= _GROUP_BYTES_MAX):
            size += len(waiting[0][0])
            group.append(waiting.popleft())
        return group

    async def _settle(self, group: list[_Waiting], signal: Signal) -> None:
        alone = len(group) == 1
        data = group[0][0] if alone else b"".join([data for data, _ in group])
        try:
            reply = await self._take(data, signal, alone=alone)
        except Rejected as error:
            if alone:
                _refuse(group, error)
                return
            for one in group:
                await self._settle([one], signal)
        except PenstockError as error:
            _refuse(group, error)
        except Exception as error:
            # A bug of ours: the senders get the error instead of waiting.
            _LOGGER.exception("storing a group of requests failed")
            _refuse(group, error)
        else:
            for _, answer in group:
                if not answer.done():
                    answer.set_result(reply)


def _refuse(group: list[_Waiting], error: Exception) -> None:
    for _, answer in group:
        # The future of a client that has left is already done.
        if not answer.done():
            answer.set_exception(error)
