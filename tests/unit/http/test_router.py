from __future__ import annotations

import pytest

from penstock.http import Request
from penstock.http.router import Router


@pytest.fixture
def router() -> Router[str]:
    router: Router[str] = Router()
    router.add(b"GET", b"/v0/topics", "list")
    router.add(b"GET", b"/v0/topics/{name}", "get")
    router.add(b"PUT", b"/v0/topics/{name}", "put")
    router.add(b"POST", b"/v0/topics/{name}/diff", "diff")
    return router


@pytest.mark.parametrize(
    ("path", "method", "route", "name"),
    [
        (b"/v0/topics", b"GET", "list", ""),
        (b"/v0/topics/a", b"PUT", "put", "a"),
        (b"/v0/topics/a%3Ab/diff", b"POST", "diff", "a:b"),
        (b"/v0/topics/a%2Fb", b"GET", "get", "a/b"),
        (b"/v0/topics/diff/diff", b"POST", "diff", "diff"),
        (b"/v0/topics/%C3%A9", b"GET", "get", "é"),
        (b"/v0/topics/%FF", b"GET", "get", "\ufffd"),
        (b"/v0/topics/a+b", b"GET", "get", "a+b"),
        (b"http://host:80/v0/topics/a", b"GET", "get", "a"),
    ],
)
def test_paths_are_found_with_their_decoded_name(
    router: Router[str], path: bytes, method: bytes, route: str, name: str
) -> None:
    for _ in range(2):
        match = router.match(path)
        assert match is not None
        assert (match.methods[method], match.name) == (route, name)


@pytest.mark.parametrize(
    "path", [b"", b"/", b"*", b"/v0/topics/", b"/v0/topics//diff", b"/v0/topics/a/b/c", b"/V0/topics", b"//"]
)
def test_other_paths_are_not(router: Router[str], path: bytes) -> None:
    assert router.match(path) is None
    assert router.match(path) is None


def test_the_cache_of_paths_is_bounded(router: Router[str]) -> None:
    for number in range(20_000):
        router.match(b"/v0/topics/t%d" % number)
    router.match(b"/v0/topics/" + b"x" * 100_000)
    assert len(router._seen) <= 8192
    assert max(map(len, router._seen)) < 1000


def test_the_first_of_repeated_query_values_counts() -> None:
    query = Request(b"GET", b"/x?a=1&a=2&b=%20c+d&e", {}).query()
    assert query == {"a": "1", "b": " c d", "e": ""}
    assert Request(b"GET", b"/x?a=%FF%", {}).query() == {"a": "\ufffd%"}
