"""`RequestTask` drives a coroutine without a task, as `asyncio.Task` does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from penstock.http.connection import RequestTask
from penstock.http.message import Response


def driven(coroutine: Coroutine[object, None, Response]) -> tuple[RequestTask, list[Response]]:
    given: list[Response] = []
    task = RequestTask(given.append)
    task.run(coroutine)
    return task, given


async def test_this_python_marks_an_awaited_future_as_blocking() -> None:
    """`RequestTask` resets this private flag of asyncio: a Python without it needs another way."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert future._asyncio_future_blocking is False

    async def wait() -> None:
        await future

    waiting = wait()
    assert waiting.send(None) is future
    assert future._asyncio_future_blocking is True
    future._asyncio_future_blocking = False
    future.set_result(None)
    with pytest.raises(StopIteration):
        waiting.send(None)


async def test_a_future_that_a_request_waits_for_can_be_awaited_by_others_too() -> None:
    future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def answer() -> Response:
        return Response(200, await future)

    task, given = driven(answer())
    other = asyncio.ensure_future(asyncio.wait_for(asyncio.shield(future), 5))
    await asyncio.sleep(0)
    assert (given, task.is_patient) == ([], False)
    future.set_result(b"done")
    assert await other == b"done"
    assert [response.body for response in given] == [b"done"]


async def test_a_coroutine_that_never_waits_is_answered_before_run_returns() -> None:
    async def answer() -> Response:
        return Response(204)

    assert [response.status for response in driven(answer())[1]] == [204]


async def test_a_request_in_a_task_is_cancelled_when_it_is_abandoned() -> None:
    ended: list[str] = []

    async def answer() -> Response:
        await asyncio.sleep(0)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return Response(200)

    task, given = driven(answer())
    assert task.is_patient
    await asyncio.sleep(0)
    task.abandon()
    for _ in range(3):
        await asyncio.sleep(0)
    assert (ended, given) == (["cancelled"], [])
