"""What a remote store's faults come out as: definite, lost or unknown, and never with a secret in them."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Iterator

import pytest
from tests import http_doubles, servers
from tests.http_doubles import Mood, Proxy

from penstock.errors import (
    ConfigError,
    Conflict,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    Rejected,
    Unavailable,
    Unsupported,
)
from penstock.objects import (
    BucketNotFound,
    ByteRange,
    ObjectStore,
    StoreConfig,
    Version,
    check_conditional_writes,
    ensure_conditional_writes,
    open_store,
)

SECRET = "do-not-print-this"

Write = Callable[[ObjectStore, str, Version], Awaitable[Version]]

CONDITIONAL: dict[str, Write] = {
    "create": lambda store, key, version: store.put_if_absent(f"{key}-new", b"mine"),
    "replace": lambda store, key, version: store.put_if_match(key, b"mine", version),
}


def s3(
    server: servers.S3Server,
    url: str = "s3://kit/faults",
    *,
    retries: int = 0,
    timeout: str = "30s",
    **options: str,
) -> ObjectStore:
    return open_store(
        StoreConfig(
            url=url, options={**server.options(), **options}, retries=retries, request_timeout=timeout
        )
    )


async def every_call(store: ObjectStore) -> list[PenstockError]:
    """The error of each call; an `AssertionError` if one succeeds."""
    errors: list[PenstockError] = []
    version = Version(etag='"x"')
    for call in (
        store.get("k"),
        store.get("k", ByteRange(start=None, length=3)),
        store.get_if_changed("k", version),
        store.put("k", b"x"),
        store.put_if_absent("k", b"x"),
        store.put_if_match("k", b"x", version),
        store.head("k"),
        store.list(""),
    ):
        try:
            await call
        except PenstockError as error:
            errors.append(error)
        else:
            raise AssertionError("the call succeeded")
    failed = await store.delete_many(["k", "l"])
    assert set(failed) == {"k", "l"}
    return [*errors, *failed.values()]


@pytest.mark.parametrize("wrong", [{"access_key_id": "nobody"}, {"secret_access_key": SECRET}])
async def test_wrong_credentials_are_permission_denied(
    seaweedfs: servers.S3Server, wrong: dict[str, str]
) -> None:
    for error in await every_call(s3(seaweedfs, **wrong)):
        assert type(error) is PermissionDenied
        assert "s3://kit/faults" in str(error)
        assert "check the access key" in str(error)
        assert SECRET not in "".join(traceback.format_exception(error))


async def test_a_reader_may_not_write(seaweedfs: servers.S3Server, folder: str) -> None:
    key = f"{folder}/k"
    version = await s3(seaweedfs).put(key, b"x")
    reader = s3(seaweedfs, access_key_id="reader")
    assert bytes((await reader.get(key)).data) == b"x"
    with pytest.raises(PermissionDenied):
        await reader.put_if_match(key, b"y", version)


async def test_a_missing_bucket_is_named(seaweedfs: servers.S3Server, moto: servers.S3Server) -> None:
    for server in (moto, seaweedfs):
        errors = await every_call(s3(server, "s3://absent-bucket/x"))
        # A HEAD has no body to tell the bucket from the object, and SeaweedFS looks at If-Match first.
        assert all(isinstance(error, NotFound | Conflict) for error in errors), errors
        named = [error for error in errors if isinstance(error, BucketNotFound)]
        assert len(named) >= len(errors) - 2
        assert all("absent-bucket" in str(error) for error in named)


async def test_a_refused_connection_is_unavailable_and_nothing_was_sent() -> None:
    (port,) = servers.free_ports(1)
    store = s3(servers.S3Server(endpoint=f"http://127.0.0.1:{port}"))
    for error in await every_call(store):
        assert type(error) is Unavailable
        assert "s3://kit/faults" in str(error)


async def test_plain_http_must_be_allowed() -> None:
    store = s3(servers.S3Server(endpoint="http://127.0.0.1:9"), allow_http="false")
    with pytest.raises(Rejected, match="allow_http"):
        await store.put_if_absent("k", b"x")


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
async def test_a_store_that_ignores_conditions_is_found_out(ignored: str, folder: str) -> None:
    with http_doubles.careless_server(ignored) as endpoint:
        store = s3(servers.S3Server(endpoint=endpoint), f"s3://careless/{folder}")
        with pytest.raises(Unsupported, match=ignored) as caught:
            await check_conditional_writes(store, "probe")
        assert "s3://careless" in str(caught.value)
        with pytest.raises(Unsupported):
            await ensure_conditional_writes(store, "probe")


async def test_a_store_is_checked_once_per_process(folder: str) -> None:
    with http_doubles.careless_server("nothing") as endpoint:
        store = s3(servers.S3Server(endpoint=endpoint), f"s3://careful/{folder}")
        await ensure_conditional_writes(store, "probe")
    # The server is gone: a second question would fail.
    await ensure_conditional_writes(store, "probe")


@pytest.fixture(scope="module")
def shared_proxy(moto: servers.S3Server) -> Iterator[Proxy]:
    with http_doubles.proxy(moto.endpoint) as running:
        yield running


@pytest.fixture
def proxy(shared_proxy: Proxy) -> Iterator[Proxy]:
    yield shared_proxy
    shared_proxy.mood = Mood.HONEST


def behind(proxy: Proxy, *, retries: int = 0, timeout: str = "30s") -> ObjectStore:
    return s3(servers.S3Server(endpoint=proxy.endpoint), retries=retries, timeout=timeout)


@pytest.mark.parametrize("write", CONDITIONAL.values(), ids=CONDITIONAL)
@pytest.mark.parametrize("mood", [Mood.LOSE_REPLY, Mood.FAIL_AFTER, Mood.LOSE_REQUEST, Mood.SLOW_DOWN])
@pytest.mark.parametrize("retries", [0, 5])
async def test_a_conditional_write_without_an_answer_is_unknown_and_sent_once(
    proxy: Proxy, folder: str, mood: Mood, write: Write, retries: int
) -> None:
    store, key = behind(proxy, retries=retries), f"{folder}/k"
    version = await store.put(key, b"old")
    proxy.mood, before = mood, proxy.writes
    with pytest.raises(OutcomeUnknown) as caught:
        await write(store, key, version)
    assert proxy.writes == before + 1
    assert key in str(caught.value)
    written = key if write is CONDITIONAL["replace"] else f"{key}-new"
    applied = mood in (Mood.LOSE_REPLY, Mood.FAIL_AFTER)
    try:
        assert (bytes((await store.get(written)).data) == b"mine") is applied
    except NotFound:
        assert not applied


async def test_a_conditional_write_that_times_out_is_unknown(proxy: Proxy, folder: str) -> None:
    store = behind(proxy, timeout="500ms")
    proxy.mood = Mood.STALL
    with pytest.raises(OutcomeUnknown, match="no reply in time"):
        await store.put_if_absent(f"{folder}/k", b"mine")
    proxy.mood, store = Mood.HONEST, behind(proxy)
    assert bytes((await store.get(f"{folder}/k")).data) == b"mine"
    with pytest.raises(Conflict):
        await store.put_if_absent(f"{folder}/k", b"again")


async def test_a_plain_write_is_repeated_until_it_is_stored(proxy: Proxy, folder: str) -> None:
    proxy.mood = Mood.LOSE_REPLY
    with pytest.raises(Unavailable):
        await behind(proxy, retries=1).put(f"{folder}/k", b"x")
    proxy.mood = Mood.HONEST
    await behind(proxy, retries=1).put(f"{folder}/k", b"x")


async def test_settings_come_from_the_environment(
    moto: servers.S3Server, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret_key)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT", moto.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "false")
    store = open_store(f"s3://kit/{folder}")
    await store.put("k", b"x")
    assert bytes((await s3(moto, f"s3://kit/{folder}").get("k")).data) == b"x"
    monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
    with pytest.raises(Rejected, match="allow_http"):
        await open_store(f"s3://kit/{folder}").get("k")


@pytest.mark.azurite
async def test_azure_distinguishes_wrong_keys_and_missing_containers(azurite: str) -> None:
    options = servers.azure_options(azurite)
    wrong = {**options, "account_key": "d3Jvbmc="}
    for error in await every_call(open_store(StoreConfig(url="az://kit/x", options=wrong, retries=0))):
        assert type(error) is PermissionDenied
    for error in await every_call(open_store(StoreConfig(url="az://absent/x", options=options, retries=0))):
        assert isinstance(error, NotFound)


def test_unknown_options_are_named_without_their_values(moto: servers.S3Server) -> None:
    with pytest.raises(ConfigError, match="acess_key_id") as caught:
        s3(moto, acess_key_id=SECRET)
    assert SECRET not in str(caught.value)


async def test_a_closed_store_says_so(moto: servers.S3Server) -> None:
    store = s3(moto)
    await store.close()
    with pytest.raises(Rejected, match="closed"):
        await store.get("k")
