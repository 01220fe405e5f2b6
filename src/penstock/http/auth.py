"""API keys, their scopes, and the names they cover."""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import ConfigError
from penstock.http.errors import Forbidden, Unauthorized
from penstock.http.message import Request
from penstock.http.sites import Sites


class Scope(enum.Flag):
    """The rights of a key."""

    NONE = 0
    READ = enum.auto()
    WRITE = enum.auto()
    DELETE = enum.auto()
    ADMIN = enum.auto()
    ALL = READ | WRITE | DELETE | ADMIN


_SCOPES: Final = {
    "read": Scope.READ,
    "r": Scope.READ,
    "write": Scope.WRITE,
    "w": Scope.WRITE,
    "delete": Scope.DELETE,
    "del": Scope.DELETE,
    "d": Scope.DELETE,
    "admin": Scope.ADMIN,
    "a": Scope.ADMIN,
    "rw": Scope.READ | Scope.WRITE,
}
_BEARER: Final = b"Bearer "


@dataclass(slots=True, eq=False, kw_only=True)
class Principal:
    """The sender of requests: one key, or any client of a server without keys. Counts its requests."""

    scopes: Scope
    prefixes: tuple[str, ...] = ()
    """Prefixes of the names it may use; if empty, any name is allowed."""
    digest: bytes = field(default=b"", repr=False)
    in_flight: int = field(default=0, repr=False)
    streams: int = field(default=0, repr=False)
    """Open streams and WebSockets."""
    bits: int = field(init=False, repr=False)
    """The scopes as a number: comparing flags is slow, and every request compares them."""

    def __post_init__(self) -> None:
        self.bits = self.scopes.value

    def require(self, scope: Scope) -> None:
        """Raise `Forbidden` unless the key has all of `scope`."""
        if scope & self.scopes != scope:
            missing = scope & ~self.scopes
            names = " and ".join(str(one.name).lower() for one in Scope if one in missing)
            raise Forbidden(f"this key lacks the scope {names}")

    def may_name(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)

    @property
    def name_filter(self) -> Callable[[str], bool] | None:
        """Return `may_name`, or None if every name is allowed."""
        return self.may_name if self.prefixes else None

    def require_name(self, name: str) -> None:
        """Raise `Forbidden` for a name outside the key's prefixes."""
        if not self.may_name(name):
            raise Forbidden("this key does not cover that name")

    def require_names(self, names: Iterable[str]) -> None:
        """Raise `Forbidden`, naming the first name outside the key's prefixes."""
        for name in names if self.prefixes else ():
            if not self.may_name(name):
                raise Forbidden("this key does not cover that name", {"topic": name})


ANYONE: Final = Principal(scopes=Scope.ALL)
"""A principal with every right, for code that runs without a keyring."""
NOBODY: Final = Principal(scopes=Scope.NONE)
"""A principal without rights, for requests that need no key."""


def no_key(request: Request) -> Principal:
    """Admit a request without a key."""
    return NOBODY


class Keyring:
    """The keys of a server, stored as digests. Without keys, every client has all rights."""

    def __init__(self, principals: Iterable[Principal] = ()) -> None:
        self._principals = tuple(principals)
        self._anyone = Principal(scopes=Scope.ALL)

    @classmethod
    def parse(cls, text: str, variable: str = "TOPICS_API_KEYS") -> Keyring:
        """Parse `key`, `key:scopes`, `key:scopes:prefixes` or `key::prefixes`, separated by commas.

        Raise `ConfigError`, which names `variable` and never quotes a key.
        """
        entries = [entry.strip() for entry in text.split(",")]
        principals = [_principal(entry, place, variable) for place, entry in enumerate(entries, 1) if entry]
        if text.strip() and not principals:
            raise ConfigError(f"{variable} is set and holds no key; unset it to run without keys")
        digests = {principal.digest for principal in principals}
        if len(digests) != len(principals):
            raise ConfigError(f"{variable} holds the same key twice")
        return cls(principals)

    def __len__(self) -> int:
        return len(self._principals)

    @property
    def has_prefixes(self) -> bool:
        """Whether some key covers only a part of the names."""
        return any(principal.prefixes for principal in self._principals)

    def __repr__(self) -> str:
        return f"Keyring({len(self._principals)} keys)"

    def authenticate(self, request: Request) -> Principal:
        """Return the sender of a request. Raise `Unauthorized` for a missing or unknown key."""
        if not self._principals:
            return self._anyone
        header = request.headers.get(b"authorization")
        if header is not None and header.startswith(_BEARER):
            return self.bearer(header[len(_BEARER) :])
        return self.principal(header)

    def authenticate_with_token(self, request: Request) -> Principal:
        """Return the sender of a request, whose key may be in the query (`?token=`) if it has no header.

        Intended for clients that cannot send headers. Raise `Unauthorized` for a missing or unknown key.
        """
        header = request.headers.get(b"authorization")
        if header is None and (token := request.query().get("token")):
            header = _BEARER + token.encode()
        return self.principal(header)

    def principal(self, authorization: bytes | None) -> Principal:
        """Return the sender with this `Authorization` header. Raise `Unauthorized` if no key matches."""
        if not self._principals:
            return self._anyone
        if authorization is None:
            raise Unauthorized("a key is needed: send `Authorization: Bearer <key>`", headers=_CHALLENGE)
        if not authorization.startswith(_BEARER):
            raise Unauthorized("the Authorization header must be `Bearer <key>`", headers=_CHALLENGE)
        return self.bearer(authorization[len(_BEARER) :])

    def bearer(self, token: bytes) -> Principal:
        """Return the holder of a key. Compare every key in constant time. Raise `Unauthorized` if unknown."""
        digest = hashlib.sha256(token).digest()
        found = None
        for principal in self._principals:
            if hmac.compare_digest(principal.digest, digest):
                found = principal
        if found is None:
            raise Unauthorized("this key is not known", headers=_CHALLENGE)
        return found


def sites_of(host: str, keys: Keyring, names: Iterable[str]) -> Sites | None:
    """Return the check that blocks other sites' pages, or None for a server with keys."""
    return None if len(keys) else Sites(host, names)


_CHALLENGE: Final = ((b"www-authenticate", b"Bearer"),)


def _principal(entry: str, place: int, variable: str) -> Principal:
    where = f"entry {place} of {variable}"
    secret, _, rest = entry.partition(":")
    scopes, _, prefixes = rest.partition(":")
    if not secret:
        raise ConfigError(f"{where} has no key before its first ':'")
    names = tuple(prefix for prefix in prefixes.split("|") if prefix)
    if prefixes and not names:
        raise ConfigError(f"{where} has an empty list of prefixes; leave it out to allow any name")
    digest = hashlib.sha256(secret.encode()).digest()
    return Principal(scopes=_scopes(scopes, where), prefixes=names, digest=digest)


def _scopes(text: str, where: str) -> Scope:
    if not text.strip():
        return Scope.ALL
    scopes = Scope.NONE
    for word in text.split("+"):
        scope = _SCOPES.get(word.strip().lower())
        if scope is None:
            raise ConfigError(
                f"{where} has the scope {word.strip()!r}, which does not exist: "
                "join read, write, delete, admin or rw with '+', or leave it empty for all"
            )
        scopes |= scope
    return scopes
