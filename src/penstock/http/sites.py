"""Protection against other sites' web pages, by the `Host`, `Origin` and `Sec-Fetch-Site` headers.

A browser sends requests on behalf of any page it shows, from inside its user's network. A server without
keys can tell such a request from one of a program only by these headers:

- DNS rebinding: another site's name that resolves to this machine appears in `Host`. An address cannot be
    rebound, so a `Host` that is an address always passes. So does a request without `Host`: no browser sends
    one.
- Cross-site requests: another site's page appears in `Origin`, and in `Sec-Fetch-Site` of newer browsers.

A server with keys does not need this check: another site's page does not have the key.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Coroutine, Iterable
from typing import Final

from penstock.errors import ConfigError
from penstock.http.message import Application, Fault, Request, Response

_NAME: Final = re.compile(rb"[a-z0-9_.-]+").fullmatch
_PLACE: Final = re.compile(rb"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::\d*)?").fullmatch
_SAFE: Final = frozenset({b"GET", b"HEAD"})
_LOCAL: Final = frozenset({b"localhost"})
_NOT_PUBLIC: Final = (b".local", b".internal")
"""No public name ends with these, so no other site can own one."""
_REMEMBERED_MAX: Final = 256
_ANY: Final = b"*"


def allowed_hosts(names: Iterable[str], setting: str) -> tuple[str, ...]:
    """Return the names in lower case. Raise `ConfigError`, naming the setting, for an invalid name."""
    found = tuple(name.strip().lower().rstrip(".") for name in names)
    for name in found:
        if (
            not name
            or not name.isascii()
            or any(mark in name for mark in "/:@, ")
            or ("*" in name and name != "*")
        ):
            raise ConfigError(
                f"{setting}: {name[:80]!r} is not a host name: write names without scheme and port, "
                "for example topics.example.org, or * for any"
            )
    return found


class Sites:
    """The accepted names of a server that listens on `host`, and the checks of a request against them.

    Always accepted: addresses, localhost, this machine's name, `host` and `names` (`*` means any). A server
    that other machines can reach also accepts names that cannot be registered publicly: those without a dot,
    and those ending in .local or .internal.
    """

    def __init__(self, host: str, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower().encode() for name in names)
        self._known = _LOCAL | self._names | {host.lower().encode(), _own_name()}
        self._is_local = host.lower() == "localhost" or _is_loopback(host)
        self._fine: set[bytes] = set()
        """Values of `Host` that passed: clients send the same few."""

    def host_refusal(self, request: Request) -> str | None:
        """Return why the name in `Host` is not accepted, or None if it is."""
        refusal = self._name_refusal(request.headers.get(b"host", b""))
        if refusal is None and not request.path.startswith(b"/"):
            # A target in absolute form also has a name, which takes precedence over `Host` (RFC 9112, 3.2.2).
            return self._name_refusal(request.path.partition(b"://")[2].partition(b"/")[0])
        return refusal

    def _name_refusal(self, host: bytes) -> str | None:
        if not host or host in self._fine:
            return None
        name = _name_of(host)
        if not self._is_reached_as(name):
            shown = name[:80].decode("ascii", "replace")
            return (
                f"this server is not known by the name {shown!r}: use its address or localhost, "
                "or add the name to the allowed hosts of the server"
            )
        if len(self._fine) < _REMEMBERED_MAX:
            self._fine.add(host)
        return None

    def _is_reached_as(self, name: bytes) -> bool:
        if name in self._known or _ANY in self._names or name.endswith(b".localhost") or _is_address(name):
            return True
        if self._is_local or _NAME(name) is None:
            return False
        return b"." not in name or name.endswith(_NOT_PUBLIC)

    def origin_refusal(self, request: Request, *, is_ambient: bool = False) -> str | None:
        """Return why the sending page is refused, or None if it is allowed or no page sends the request.

        `is_ambient`: the browser authenticates the request automatically, so a missing `Origin` proves
        nothing.
        """
        headers = request.headers
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is not None and self._is_own(origin, headers.get(b"host", b"")):
            return None
        if origin is None and not is_ambient and site in (None, b"same-origin", b"none"):
            return None
        if origin is None and site == b"same-origin":
            return None
        return (
            "this request comes from a page of another site; add its name to the allowed hosts to let it in"
        )

    def _is_own(self, origin: bytes, host: bytes) -> bool:
        place = origin.partition(b"://")[2].lower()
        return bool(place) and (
            place == host.lower() or _ANY in self._names or _name_of(place) in self._names
        )

    def refusal(self, request: Request) -> str | None:
        """Return why a server without keys refuses this request, or None if it is allowed."""
        found = self.host_refusal(request)
        headers = request.headers
        if found is None and (
            b"origin" in headers or (b"sec-fetch-site" in headers and request.method not in _SAFE)
        ):
            return self.origin_refusal(request)
        return found


class Guarded:
    """An `Application` that passes requests to `app` only if `sites` allows them."""

    def __init__(self, app: Application, sites: Sites) -> None:
        self._app = app
        self._sites = sites
        self.fault = app.fault

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        """Implement `Application.begin`."""
        refusal = self._sites.refusal(request)
        if refusal is None:
            return self._app.begin(request, deliver)
        deliver(self._app.fault(Fault.FORBIDDEN, refusal, request))
        return None

    def screen(self, request: Request) -> Response | None:
        """Implement `Application.screen`."""
        refusal = self._sites.refusal(request)
        if refusal is None:
            return self._app.screen(request)
        return self._app.fault(Fault.FORBIDDEN, refusal, request)


def _name_of(host: bytes) -> bytes:
    """Return the name in `name:port`, lower case, without a trailing dot; empty if malformed."""
    found = _PLACE(host.strip().lower())
    return (found["address"] or found["name"] or b"").rstrip(b".") if found else b""


def _own_name() -> bytes:
    return socket.gethostname().lower().encode("ascii", "replace")


def _is_address(name: bytes) -> bool:
    try:
        ipaddress.ip_address(name.decode("ascii", "replace"))
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
