"""Access to the console: by keys, or by a one-time token for a session on this machine.

With keys, every request sends one. Without keys, the console listens only on the loopback address and prints
a token for one session. A page of another site must not be able to use either:

- A request through another name of this machine (DNS rebinding) is refused by its `Host`.
- A request from another origin is refused by `Sec-Fetch-Site` and `Origin`.
- The session is a cookie that only the console's own pages send (`SameSite=Strict`).

Sessions survive a restart within a day of their start. A file that only the owner can read stores their
digests.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.clock import Clock
from penstock.errors import ConfigError
from penstock.http import (
    Forbidden,
    Keyring,
    Principal,
    Request,
    Scope,
    Sites,
    Unauthorized,
    allowed_hosts,
)
from penstock.servers import check_reach

_LOG = logging.getLogger(__name__)

_SESSIONS_MAX: Final = 64
_IDLE_S: Final = 24 * 3600.0
_FILE_BYTES_MAX: Final = 64 * 1024
_SAFE: Final = frozenset({b"GET", b"HEAD"})
DEFAULT_PORT: Final = 4600
KEYS_VARIABLE: Final = "PENSTOCK_CONSOLE_KEYS"
LOOK: Final = Scope.READ
"""The scope required to view anything."""
ACT: Final = Scope.READ | Scope.WRITE
"""The scope required to change something."""


class Access:
    """Authenticates requests. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        keys: Keyring,
        clock: Clock,
        *,
        host: str,
        is_loopback: bool,
        names: Iterable[str] = (),
        sessions_file: str = "",
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._sites = Sites(host, names)
        self._checks_host = is_loopback
        self._cookie = "penstock_console"
        self._token: bytes | None = None
        self._sessions: OrderedDict[bytes, float] = OrderedDict()
        self._owner = Principal(scopes=Scope.ALL)
        self._sessions_file = sessions_file
        self._begun_ms = {} if self.asks_keys else _remembered(sessions_file, clock.now_ms())
        for digest in self._begun_ms:
            self._sessions[digest] = clock.monotonic()

    @property
    def asks_keys(self) -> bool:
        return len(self._keys) > 0

    def bound(self, port: int) -> None:
        """Name the cookie after the port, because all ports of a host share cookies."""
        self._cookie = f"penstock_console_{port}"

    def new_token(self) -> str:
        """Return a token for one session. The previous token becomes invalid."""
        token = secrets.token_urlsafe(32)
        self._token = _digest(token.encode())
        return token

    def check_host(self, request: Request) -> None:
        """Raise `Forbidden` for a host name that merely resolves to this machine."""
        refusal = self._sites.host_refusal(request) if self._checks_host else None
        if refusal is not None:
            raise Forbidden(refusal)

    def principal(self, request: Request) -> Principal:
        """Return the sender of a request. Raise `Unauthorized`, or `Forbidden` for other sites."""
        authorization = request.headers.get(b"authorization")
        if request.method not in _SAFE:
            self._check_origin(request, is_ambient=authorization is None)
        if self.asks_keys:
            return self._keys.principal(authorization)
        if self._has_session(request):
            return self._owner
        raise Unauthorized("open the address that was printed at the start: it contains a one-time token")

    def begin_session(self, request: Request, token: str) -> tuple[bytes, bytes]:
        """Return the cookie header for a client that sends the token. The token becomes invalid.

        Raise `Unauthorized`, or `Forbidden` for other sites.
        """
        self._check_origin(request, is_ambient=False)
        if self.asks_keys:
            raise Unauthorized("this console has keys: send `Authorization: Bearer <key>` with every request")
        if self._token is None or not hmac.compare_digest(self._token, _digest(token.encode())):
            raise Unauthorized("this token is no longer valid: a token opens one session")
        self._token = None
        secret = secrets.token_urlsafe(32)
        digest = _digest(secret.encode())
        self._sessions[digest] = self._clock.monotonic()
        while len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        self._begun_ms[digest] = self._clock.now_ms()
        self._begun_ms = {one: self._begun_ms[one] for one in self._sessions if one in self._begun_ms}
        _remember(self._sessions_file, self._begun_ms)
        cookie = f"{self._cookie}={secret}; Path=/console; HttpOnly; SameSite=Strict"
        return b"set-cookie", cookie.encode()

    def _check_origin(self, request: Request, *, is_ambient: bool) -> None:
        """Raise `Forbidden` unless the sender is the console's own page, or a program with its own secret."""
        refusal = self._sites.origin_refusal(request, is_ambient=is_ambient)
        if refusal is not None:
            raise Forbidden(refusal)

    def _has_session(self, request: Request) -> bool:
        found = None
        for secret in _cookies(request, self._cookie.encode()):
            digest = _digest(secret)
            for known in self._sessions:
                if hmac.compare_digest(known, digest):
                    found = known
        if found is None:
            return False
        now = self._clock.monotonic()
        if now - self._sessions[found] > _IDLE_S:
            del self._sessions[found]
            return False
        self._sessions[found] = now
        return True


def _remembered(path: str, now_ms: int) -> dict[bytes, int]:
    """Return the digests of sessions that began within a day, or none if the file cannot be read."""
    if not path:
        return {}
    try:
        with open(path, "rb") as file:
            found = msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=dict[str, int])
        kept = {bytes.fromhex(digest): at_ms for digest, at_ms in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        _LOG.warning("sessions in %s cannot be read, browsers need a new token: %s", path, error)
        return {}
    fresh = {digest: at_ms for digest, at_ms in kept.items() if 0 <= now_ms - at_ms < _IDLE_S * 1000}
    return dict(list(fresh.items())[-_SESSIONS_MAX:])


def _remember(path: str, begun_ms: dict[bytes, int]) -> None:
    """Store the digests. If that fails, browsers need a new token after the next restart."""
    if not path:
        return
    draft = f"{path}.tmp"
    data = msgspec.json.encode({digest.hex(): at_ms for digest, at_ms in begun_ms.items()})
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except OSError as error:
        _LOG.warning("sessions of the console cannot be stored and will not survive a restart: %s", error)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _cookies(request: Request, name: bytes) -> Iterator[bytes]:
    """Yield the values of a cookie. Other programs on this machine may add cookies in any form."""
    for pair in re.split(rb"[;,]", request.headers.get(b"cookie", b"")):
        key, _, value = pair.strip().partition(b"=")
        if key == name:
            yield value


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """The console's settings.

    Raise `ConfigError` if other machines could connect without a key, or if a key has a prefix.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """The port, or 0 for a free one."""
    keys: Keyring = field(default_factory=Keyring)
    """`read` allows viewing; a redrive requires `write`."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted `Host` and `Origin` besides addresses, localhost and this machine's name. `*` accepts any."""
    sessions_file: str = ""
    """The file that stores the digests of sessions. Without it, sessions end with the process."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"the console's port is {self.port}; expected 0 to 65535")
        _ = allowed_hosts(self.allowed_hosts, "allowed_hosts")
        if self.keys.has_prefixes:
            raise ConfigError(
                f"{KEYS_VARIABLE}: the console shows the whole machine, so its keys must not have prefixes"
            )
        check_reach(
            self.host,
            has_keys=len(self.keys) > 0,
            allowed=False,
            remedy=f"set {KEYS_VARIABLE}, or bind the console to 127.0.0.1",
        )

    def __repr__(self) -> str:
        return f"ConsoleSettings(host={self.host!r}, port={self.port}, keys={self.keys!r})"
