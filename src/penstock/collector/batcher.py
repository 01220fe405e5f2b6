"""Small requests that come at the same time, put together before they are turned into columns.

Setting up the columns of a batch costs as much as about two hundred rows. While one group is decoded and made
durable, the next one accumulates, so no request waits for others to arrive.

Requests are joined as bytes: the fields of two messages that follow each other are the fields of both. That
holds only if each one ends where its last field ends, which is checked before. What else may be wrong with
one of them shows when the group is decoded; then each is taken alone, and only that one is refused.

A look at a request's outermost fields, so that garbage is refused without building a message. Pure.
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
"""Counting the fields of a larger request would delay all others."""

_LOGGER = logging.getLogger(__name__)
_GROUP_BYTES_MAX: Final = 1024**2
_Waiting: TypeAlias = tuple[bytes, "asyncio.Future[Reply]"]


def check_framing(data: bytes) -> int:
    """Count the resources of a serialized export request (field 1, of any signal).

    Costs one step per resource, whatever it holds: what is inside a field is not looked at. Raises
    `InvalidInput` unless the bytes are a whole number of well-formed fields, and `LimitExceeded` for more
    than `RESOURCES_MAX`.
    """
    count = resources = 0
    try:
        for number, wire_type, _, _ in fields(data):
            count += 1
            if count > RESOURCES_MAX:
                raise LimitExceeded(
                    f"the request holds more than {RESOURCES_MAX} resources; send fewer in one"
                )
            if number == 1:
                if wire_type != LENGTH_DELIMITED:
                    raise InvalidInput("its first field is no message")
                resources += 1
    except InvalidInput as error:
        raise InvalidInput(f"this is no OTLP request: {error}") from error
    return resources


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a request that was accepted: how many items were refused, and why."""

    rejected: int = 0
    message: str = ""


TAKEN: Final = Reply()
"""The reply to a request of which everything was accepted."""


class Mixed(Rejected):
    """Some items of a group must be refused; decoding its requests separately shows whose they are."""


class Take(Protocol):
    """Keeps what one request or several joined ones hold, and says so when it is durable."""

    async def __call__(self, data: bytes, signal: Signal, *, alone: bool) -> Reply:
        """Raises `Rejected`, having kept nothing, for what it does not want as a whole.

        That is `Mixed` for several requests with items to refuse.
        """
        ...


class RequestBatcher:
    """Passes requests to `take` in groups, and returns its own result to each sender."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._waiting: dict[Signal, deque[_Waiting]] = {signal: deque() for signal in Signal}
        self._runners: dict[Signal, asyncio.Task[None]] = {}

    async def add(self, data: bytes, signal: Signal) -> Reply:
        """Return the reply to one request. Raises what is wrong with it, and what storing it raised."""
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
            _LOGGER.exception("a group of requests broke")
            _refuse(group, error)
        else:
            for _, answer in group:
                if not answer.done():
                    answer.set_result(reply)


def _refuse(group: list[_Waiting], error: Exception) -> None:
    for _, answer in group:
        # One whose client has left is done already.
        if not answer.done():
            answer.set_exception(error)
