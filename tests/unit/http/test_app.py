"""The application of every HTTP port: the order of its checks, and its responses to errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.errors import Unavailable
from penstock.http import (
    App,
    Call,
    Fault,
    Forbidden,
    Keyring,
    Policy,
    Principal,
    Request,
    Response,
    Route,
    Scope,
    body_limit,
    no_key,
)

KEYS = Keyring.parse("reader:read,writer:write:a")


def words(error: Exception, request: Request | None) -> Response:
    """Return the name of the error as a body, with a status used nowhere else."""
    path = b"-" if request is None else request.path
    return Response(599, type(error).__name__.encode() + b" " + path)


async def handler(call: Call) -> Response:
    return Response(200, b"handled " + call.name.encode())


def app_of(*routes: tuple[bytes, bytes, Route[Call]], **policy: object) -> App[Call]:
    return App(routes, Policy(call=Call, authenticate=KEYS.authenticate, **policy), words)  # type: ignore[arg-type]


def ask(app: App[Call], path: bytes, *, method: bytes = b"GET", key: bytes = b"", size: int = 0) -> bytes:
    headers = {b"authorization": b"Bearer " + key} if key else {}
    given: list[Response] = []
    coroutine = app.begin(Request(method, path, headers, b"x" * size), given.append)
    if coroutine is not None:

        async def run() -> None:
            given.append(await coroutine)

        asyncio.run(run())
    (response,) = given
    assert isinstance(response.body, bytes)
    return response.body


def raising(error: Exception) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        raise error

    return check


def not_ready() -> None:
    raise Unavailable("not yet")


ORDER = app_of(
    (b"GET", b"/all/{name}", Route(handler=handler, scope=Scope.WRITE, check=body_limit(lambda: 3))),
    (b"GET", b"/probe", Route(handler=handler, scope=Scope.NONE, auth=no_key, ready=False)),
)


@pytest.mark.parametrize(
    ("path", "method", "key", "size", "answer"),
    [
        (b"/nowhere", b"GET", b"", 0, b"Unauthorized /nowhere"),
        (b"/all/a", b"PUT", b"", 0, b"Unauthorized /all/a"),
        (b"/nowhere", b"GET", b"reader", 0, b"UnknownPath /nowhere"),
        (b"/all/a", b"PUT", b"reader", 0, b"MethodNotAllowed /all/a"),
        (b"/all/b", b"GET", b"reader", 9, b"Forbidden /all/b"),
        (b"/all/b", b"GET", b"writer", 9, b"Forbidden /all/b"),
        (b"/all/a", b"GET", b"writer", 9, b"PayloadTooLarge /all/a"),
        (b"/all/a", b"GET", b"writer", 3, b"handled a"),
        (b"/probe", b"GET", b"", 0, b"handled "),
    ],
)
def test_the_first_failed_check_determines_the_response(
    path: bytes, method: bytes, key: bytes, size: int, answer: bytes
) -> None:
    assert ask(ORDER, path, method=method, key=key, size=size) == answer


def test_readiness_comes_after_the_key_and_before_the_routes_own_check() -> None:
    checked = Route(handler=handler, scope=Scope.READ, check=raising(Forbidden("no")))
    app = app_of((b"GET", b"/it", checked), check_ready=not_ready)
    assert ask(app, b"/it") == b"Unauthorized /it"
    assert ask(app, b"/it", key=b"reader") == b"Unavailable /it"


def test_a_guard_comes_before_everything_and_before_pages() -> None:
    guarded = app_of(guard=raising(Forbidden("no")), page=lambda request: Response(200, b"page"))
    assert ask(guarded, b"/page") == b"Forbidden /page"
    assert ask(app_of(page=lambda request: Response(200, b"page")), b"/page") == b"page"


def test_a_request_without_a_route_goes_to_the_fallback_unchecked() -> None:
    behind = app_of((b"GET", b"/behind", Route(handler=handler, scope=Scope.NONE, auth=no_key)))
    front = app_of(
        (b"GET", b"/own", Route(handler=handler, scope=Scope.NONE)),
        guard=raising(Forbidden("no")),
        fallback=behind,
    )
    assert ask(front, b"/behind") == b"handled "
    assert ask(front, b"/own") == b"Forbidden /own"
    assert front.screen(Request(b"GET", b"/behind", {})) is None


def test_the_head_alone_passes_the_same_checks() -> None:
    announced = {b"authorization": b"Bearer writer", b"content-length": b"4"}
    refused = ORDER.screen(Request(b"GET", b"/all/a", announced))
    assert refused is not None
    assert refused.body == b"PayloadTooLarge /all/a"
    assert ORDER.screen(Request(b"GET", b"/all/a", {**announced, b"content-length": b"3"})) is None


class Counter:
    def __init__(self) -> None:
        self.under_way = 0

    def enter(self, principal: Principal) -> None:
        self.under_way += 1

    def leave(self, principal: Principal) -> None:
        self.under_way -= 1


async def test_a_request_counts_from_its_handler_to_its_response() -> None:
    counter, gate = Counter(), asyncio.Event()

    async def waiting(call: Call) -> Response:
        await gate.wait()
        raise Unavailable("gone")

    app = app_of((b"GET", b"/it", Route(handler=waiting, scope=Scope.NONE, auth=no_key, cap=counter)))
    coroutine = app.begin(Request(b"GET", b"/it", {}), lambda response: None)
    assert coroutine is not None
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    assert counter.under_way == 1
    gate.set()
    assert (await task).body == b"Unavailable /it"
    assert counter.under_way == 0


def test_a_callback_counts_until_it_delivers_or_raises() -> None:
    counter = Counter()
    later: list[Callable[[Response], None]] = []

    def callback(call: Call, deliver: Callable[[Response], None]) -> None:
        if later:
            raise Unavailable("not now")
        later.append(deliver)

    route = Route(callback=callback, scope=Scope.NONE, auth=no_key, cap=counter)
    app = app_of((b"GET", b"/it", route))
    given: list[Response] = []
    assert app.begin(Request(b"GET", b"/it", {}), given.append) is None
    assert (counter.under_way, given) == (1, [])
    later[0](Response(200, b"later"))
    assert (counter.under_way, [response.body for response in given]) == (0, [b"later"])
    assert app.begin(Request(b"GET", b"/it", {}), given.append) is None
    assert (counter.under_way, given[-1].body) == (0, b"Unavailable /it")


def test_every_response_of_the_application_has_the_headers_of_its_policy() -> None:
    header = (b"x-content-type-options", b"nosniff")
    app = app_of((b"GET", b"/it", Route(handler=handler, scope=Scope.NONE, auth=no_key)), headers=[header])
    given: list[Response] = []
    app.begin(Request(b"GET", b"/nowhere", {}), given.append)
    given.append(app.fault(Fault.TOO_LARGE, "too large"))
    assert given[-1].body == b"TransportFault -"
    assert [list(response.headers) for response in given] == [[header], [header]]
