"""The console's HTTP application: access checks, routes, static files, and errors as JSON."""

from __future__ import annotations

import base64
import gzip
import hashlib
import logging
import mimetypes
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import httpx
import msgspec

from penstock.console.access import LOOK, Access
from penstock.console.poller import reason_of
from penstock.errors import (
    ConfigError,
    Conflict,
    InvalidInput,
    LimitExceeded,
    NotFound,
    PenstockError,
    Unavailable,
)
from penstock.http import (
    App,
    HeaderList,
    Policy,
    Principal,
    Refusal,
    Request,
    Response,
    Scope,
    UnknownPath,
    UnsupportedMediaType,
)
from penstock.http import Call as HttpCall
from penstock.http import Route as HttpRoute
from penstock.jsontext import check_json
from penstock.servers import STATUS as _STATUS
from penstock.servers import told

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
BODY_BYTES_MAX: Final = 1 << 20
ANSWER_S: Final = 40.0
"""Time limit of a request, because a part or a store may hang. For a stream, the limit until it begins."""
TEXT_BYTES_MAX: Final = 4096
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
_PACKED: Final = (".css", ".html", ".js", ".json", ".mjs", ".svg", ".txt", ".md")
_ROOT: Final = b"/console"
_STATIC: Final = b"/console/static/"
_API: Final = b"/console/api/"
_HEADERS: Final = (
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
            b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_NO_STORE: Final = (b"cache-control", b"no-store")
_ENCODE: Final = msgspec.json.Encoder().encode


class Call(HttpCall):
    """An admitted request with its sender, the name in its path, and its query."""

    __slots__ = ("query",)

    def __init__(self, request: Request, principal: Principal, name: str) -> None:
        super().__init__(request, principal, name)
        self.query = request.query()


Handler: TypeAlias = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(HttpRoute[Call]):
    """A handler with the scope that it requires, by default that of a viewer."""

    scope: Scope = LOOK


def json_answer(value: object, status: int = 200, headers: HeaderList = ()) -> Response:
    return Response(status, _ENCODE(value), headers=[_NO_STORE, *headers])


def number_of(call: Call, name: str, default: int, *, least: int = 0, most: int) -> int:
    """Return a whole number of the query, limited to `most`. Raise `InvalidInput`."""
    text = call.query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) >= least):
        raise InvalidInput(f"{name}: expected a whole number of at least {least}, found {text[:40]!r}")
    return min(int(text), most)


def read_body(call: Call, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the body as JSON. Raise `InvalidInput` or `UnsupportedMediaType`."""
    kind = call.request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise UnsupportedMediaType("send the body as Content-Type: application/json")
    check_json(call.request.body)
    try:
        return decoder.decode(call.request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not valid: {error}") from None


class ConsoleApp(App[Call]):
    """An `Application` that serves the page to every client and the API to authenticated ones."""

    def __init__(
        self, access: Access, static: StaticFiles, routes: Sequence[tuple[bytes, bytes, Route]]
    ) -> None:
        self._access = access
        self._static = static
        policy = Policy(
            call=Call,
            authenticate=self._authenticate,
            guard=access.check_host,
            page=self._static_page,
            own_task=True,
            timeout_s=ANSWER_S,
            headers=_HEADERS,
        )
        super().__init__([(method, _API + path, route) for method, path, route in routes], policy, refusal)

    def _authenticate(self, request: Request) -> Principal:
        if not request.path.startswith(_API):
            raise UnknownPath("nothing is at this path; the console is at /console")
        return self._access.principal(request)

    def _static_page(self, request: Request) -> Response | None:
        """Return a static file or a redirect, neither of which contains a secret, or None."""
        path = request.path
        if path.startswith(_API) or request.method not in (b"GET", b"HEAD"):
            return None
        if path == b"/":
            return Response(307, headers=[(b"location", _ROOT)])
        if path in (_ROOT, _ROOT + b"/"):
            name = "index.html"
        elif path.startswith(_STATIC):
            name = path[len(_STATIC) :].decode("ascii", "replace")
        else:
            return None
        return self._static.answer(request, name)


def error_answer(status: int, code: str, message: str, headers: HeaderList = ()) -> Response:
    return json_answer({"error": {"code": code, "message": message}}, status, headers)


def refusal(error: Exception, request: Request | None = None) -> Response:
    """Return the response for an error. An unexpected error is logged and returned as `internal`."""
    if isinstance(error, Refusal):
        return error_answer(_STATUS[error.code], error.code, str(error), error.headers)
    if isinstance(error, NotFound):
        return error_answer(404, "not_found", told(error))
    if isinstance(error, Conflict):
        return error_answer(409, "conflict", told(error))
    if isinstance(error, LimitExceeded):
        return error_answer(429, "throttled", told(error), [(b"retry-after", b"1")])
    if isinstance(error, InvalidInput | ConfigError):
        return error_answer(400, "invalid_request", told(error))
    if isinstance(error, PenstockError | TimeoutError | OSError | httpx.HTTPError):
        headers = [(b"retry-after", b"1")] if isinstance(error, Unavailable) else []
        return error_answer(503, "unavailable", reason_of(error), headers)
    _LOG.error("a request failed", exc_info=error)
    return error_answer(500, "internal", "the request failed; see the console's log")


def text_fields(data: bytes, most: int = TEXT_BYTES_MAX) -> dict[str, object]:
    """Return fields with the bytes as text, or None if they are not text, and whether the text was cut."""
    cut = len(data) > most
    shown = data[:most]
    try:
        text: str | None = shown.decode()
    except UnicodeDecodeError as error:
        # The cut may split a character; any other error means that this is not text.
        text = shown[: error.start].decode() if cut and error.start > len(shown) - 4 else None
    return {"text": text, "cut": cut}


def payload_fields(data: bytes | None, most: int = TEXT_BYTES_MAX) -> dict[str, object]:
    """Return fields with the bytes as text and in base64."""
    if data is None:
        return {"text": None, "cut": False, "bytes_b64": None, "size": None}
    packed = base64.b64encode(data[:most]).decode()
    return {**text_fields(data, most), "bytes_b64": packed, "size": len(data)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    stamp: tuple[int, int]
    data: bytes
    packed: bytes | None
    kind: bytes
    tag: bytes


class StaticFiles:
    """The files below a folder, by path. A file that has changed is read again."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}

    def answer(self, request: Request, name: str) -> Response | None:
        """Return the file, 304 if the browser has it, or None if it does not exist."""
        file = self._file(name)
        if file is None:
            return None
        headers = [(b"etag", file.tag), (b"cache-control", b"no-cache"), (b"vary", b"accept-encoding")]
        if file.tag in _tags(request.headers.get(b"if-none-match", b"")):
            return Response(304, content_type=file.kind, headers=headers)
        if file.packed is not None and b"gzip" in request.headers.get(b"accept-encoding", b""):
            headers.append((b"content-encoding", b"gzip"))
            return Response(200, file.packed, content_type=file.kind, headers=headers)
        return Response(200, file.data, content_type=file.kind, headers=headers)

    def _file(self, name: str) -> _File | None:
        parts = name.split("/")
        if not all(parts) or any(part.startswith(".") or "\\" in part or "\0" in part for part in parts):
            return None
        path = os.path.join(self._folder, *parts)
        try:
            found = os.stat(path)
            if not os.path.isfile(path):
                return None
            known = self._files.get(name)
            stamp = (found.st_mtime_ns, found.st_size)
            if known is None or known.stamp != stamp:
                known = self._files[name] = _read(path, stamp)
        except OSError:
            return None
        return known


def _read(path: str, stamp: tuple[int, int]) -> _File:
    with open(path, "rb") as file:
        data = file.read()
    ending = os.path.splitext(path)[1].lower()
    kind = _TYPES.get(ending) or mimetypes.guess_type(path)[0] or "application/octet-stream"
    packed = gzip.compress(data, 9, mtime=0) if ending in _PACKED else None
    tag = b'"%b"' % hashlib.sha256(data).hexdigest()[:32].encode()
    return _File(stamp=stamp, data=data, packed=packed, kind=kind.encode(), tag=tag)


def _tags(header: bytes) -> set[bytes]:
    return {tag.strip().removeprefix(b"W/") for tag in header.split(b",")}
