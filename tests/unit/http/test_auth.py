from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.http.auth import Keyring, Scope
from penstock.http.errors import Forbidden, Unauthorized


@pytest.mark.parametrize(
    ("entry", "scopes", "prefixes"),
    [
        ("k", Scope.ALL, ()),
        ("k:read", Scope.READ, ()),
        ("k:R+W", Scope.READ | Scope.WRITE, ()),
        ("k:rw+del", Scope.READ | Scope.WRITE | Scope.DELETE, ()),
        ("k:admin+d:a|b.", Scope.ADMIN | Scope.DELETE, ("a", "b.")),
        ("k::team:a|team:b", Scope.ALL, ("team:a", "team:b")),
        (" k ", Scope.ALL, ()),
    ],
)
def test_keys_are_read(entry: str, scopes: Scope, prefixes: tuple[str, ...]) -> None:
    principal = Keyring.parse(f"other:read,{entry}").principal(b"Bearer k")
    assert (principal.scopes, principal.prefixes) == (scopes, prefixes)


@pytest.mark.parametrize("text", ["k:reed", "k:+", "k:read+", ":read", "k::|", ",", "k,k:read"])
def test_invalid_keys_are_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Keyring.parse(text.replace("k", "s3cr3t"))
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize(
    "header", [None, b"", b"k", b"bearer k", b"Bearer", b"Bearer ", b"Bearer  k", b"Bearer K", b"Basic k"]
)
def test_only_the_exact_key_is_accepted(header: bytes | None) -> None:
    with pytest.raises(Unauthorized):
        Keyring.parse("k").principal(header)


def test_keys_stay_out_of_repr() -> None:
    keys = Keyring.parse("s3cr3t:read")
    assert "s3cr3t" not in f"{keys!r} {keys.principal(b'Bearer s3cr3t')!r}"


def test_without_keys_every_client_has_all_scopes() -> None:
    principal = Keyring.parse("").principal(None)
    principal.require(Scope.ALL)
    principal.require_name("anything")


def test_scopes_and_prefixes_are_required() -> None:
    principal = Keyring.parse("k:read+write:a.|b").principal(b"Bearer k")
    for _ in range(2):
        principal.require(Scope.READ)
        with pytest.raises(Forbidden, match="admin"):
            principal.require(Scope.ADMIN | Scope.READ)
    principal.require_name("a.x")
    principal.require_name("b")
    for name in ("a", "A.x", "xa.", ""):
        with pytest.raises(Forbidden):
            principal.require_name(name)
