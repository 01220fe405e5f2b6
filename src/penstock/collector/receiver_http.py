"""The OTLP receiver over HTTP: protobuf and JSON on one port, with or without compression.

Compressed bodies are decompressed in pieces with a size limit, so that a decompression bomb is harmless.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Final

from penstock import otlp
from penstock.codec import decompress
from penstock.collector.batcher import TAKEN, Reply
from penstock.collector.limiter import ReceiverLimiter
from penstock.collector.settings import Address
from penstock.collector.status import RETRY_AFTER_S, Refusal, status_bytes, status_json
from penstock.errors import Corrupt, InvalidInput, LimitExceeded, Unavailable, Unsupported
from penstock.http import (
    NOBODY,
    App,
    Call,
    Fault,
    HeaderList,
    HttpLimits,
    Listener,
    MethodNotAllowed,
    Policy,
    Principal,
    Request,
    Response,
    Route,
    Scope,
    Sites,
    TransportFault,
    UnknownPath,
)
from penstock.otlp import Signal

_PIECE: Final = 256 * 1024
_GZIP_WINDOW: Final = 31
_ZLIB_WINDOW: Final = 15


def inflate(data: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Return the body without its `Content-Encoding`, of at most `limit_bytes`.

    Raise `Unsupported` for an unknown encoding, `LimitExceeded` as soon as the limit is exceeded, and
    `InvalidInput` if the data is damaged, truncated, or followed by other data.
    """
    unpack = ENCODINGS.get(encoding)
    if unpack is None:
        known = ", ".join(sorted(name for name in ENCODINGS if name))
        raise Unsupported(f"the content encoding {encoding[:40]!r} is not supported; use {known}")
    return unpack(data, limit_bytes)


def _check_size(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise LimitExceeded(f"the request is larger than {limit_bytes} bytes, counted after decompression")


def _identity(data: bytes, limit_bytes: int) -> bytes:
    _check_size(len(data), limit_bytes)
    return data


def _zlib(window_bits: int) -> Callable[[bytes, int], bytes]:
    def unpack(data: bytes, limit_bytes: int) -> bytes:
        if not data:
            raise InvalidInput("the body cannot be decompressed: it is empty")
        found: list[bytes] = []
        total = 0
        try:
            for piece in _pieces(data, window_bits):
                total += len(piece)
                _check_size(total, limit_bytes)
                found.append(piece)
        except zlib.error as error:
            raise InvalidInput(f"the body cannot be decompressed: {error}") from None
        return found[0] if len(found) == 1 else b"".join(found)

    return unpack


def _pieces(data: bytes, window_bits: int) -> Iterator[bytes]:
    """Yield the decompressed pieces of a body, which may have several gzip members."""
    while data:
        member = zlib.decompressobj(wbits=window_bits)
        while not member.eof:
            piece = member.decompress(data, _PIECE)
            data = member.unconsumed_tail
            if piece:
                yield piece
            elif not data and not member.eof:
                raise InvalidInput("the body cannot be decompressed: it ends early")
        data = member.unused_data


def _zstd(data: bytes, limit_bytes: int) -> bytes:
    try:
        return bytes(memoryview(decompress(memoryview(data), bytes_max=limit_bytes)))
    except Corrupt as error:
        # The data comes from the client, so it is not kept as evidence of damage.
        raise InvalidInput(f"the body cannot be decompressed: {error}") from None


ENCODINGS: Final[dict[str, Callable[[bytes, int], bytes]]] = {
    "": _identity,
    "identity": _identity,
    "gzip": _zlib(_GZIP_WINDOW),
    "deflate": _zlib(_ZLIB_WINDOW),
    "zstd": _zstd,
}


_PATHS: Final = {f"/v1/{signal.value}".encode(): signal for signal in Signal}
_PROTOBUF: Final = b"application/x-protobuf"
_JSON: Final = b"application/json"
_TYPES: Final = frozenset({_PROTOBUF, _JSON})
_INLINE_BYTES: Final = 64 * 1024
_REJECTED: Final = {
    Signal.TRACES: "rejectedSpans",
    Signal.METRICS: "rejectedDataPoints",
    Signal.LOGS: "rejectedLogRecords",
}


class OtlpApplication(App[Call]):
    """The HTTP application with the three paths of the protocol."""

    def __init__(self, limiter: ReceiverLimiter, *, request_bytes_max: int) -> None:
        self._limiter = limiter
        self._request_bytes_max = request_bytes_max
        policy = Policy(
            call=Call, authenticate=self._authenticate, missed=_missed, hides_paths=False, own_task=True
        )
        super().__init__(
            [self._route(path, signal) for path, signal in _PATHS.items()], policy, self._refusal
        )

    def _route(self, path: bytes, signal: Signal) -> tuple[bytes, bytes, Route[Call]]:
        async def take(call: Call) -> Response:
            data = await self._body(call.request, signal)
            return _taken(call.request, signal, await self._limiter.take(data, signal))

        # The limiter counts a request while its data is in use, which may be longer than the call.
        return b"POST", path, Route(handler=take, scope=Scope.NONE, check=self._check)

    def _authenticate(self, request: Request) -> Principal:
        self._limiter.check_token(_text(request.headers.get(b"authorization")))
        return NOBODY

    def _check(self, request: Request) -> None:
        """Check the type and encoding of a request, and whether there is room for it."""
        _check_head(request)
        self._limiter.check_open(len(request.body))

    def _refusal(self, error: Exception, request: Request | None) -> Response:
        if isinstance(error, TransportFault | UnknownPath | MethodNotAllowed):
            known = _FAULTS[error.fault] if isinstance(error, TransportFault) else _MISSED[error.code]
            refusal = Refusal(
                code=known.code, status=known.status, message=str(error), retry_after_s=known.retry_after_s
            )
            return _response(request, refusal, error.headers)
        signal = None if request is None else _PATHS.get(request.path)
        return _response(request, self._limiter.refusal(error, signal))

    async def _body(self, request: Request, signal: Signal) -> bytes:
        """Return the request as protobuf."""
        encoding = _encoding(request)
        is_json = _type(request) == _JSON
        if not is_json and encoding in ("", "identity"):
            return request.body
        if len(request.body) <= _INLINE_BYTES and is_json and encoding in ("", "identity"):
            return otlp.from_json(request.body, signal)
        body = request.body
        return await self._limiter.run_on_thread(len(body), self._unpacked, body, encoding, signal, is_json)

    def _unpacked(self, body: bytes, encoding: str, signal: Signal, is_json: bool) -> bytes:
        data = inflate(body, encoding, self._request_bytes_max)
        return otlp.from_json(data, signal) if is_json else data


_FAULTS: Final = {
    Fault.MALFORMED: Refusal(code="INVALID_ARGUMENT", status=400, message=""),
    Fault.TOO_LARGE: Refusal(code="RESOURCE_EXHAUSTED", status=413, message=""),
    Fault.OVERLOADED: Refusal(code="UNAVAILABLE", status=503, message="", retry_after_s=RETRY_AFTER_S),
    Fault.FORBIDDEN: Refusal(code="PERMISSION_DENIED", status=403, message=""),
}


_MISSED: Final = {
    UnknownPath.code: Refusal(code="NOT_FOUND", status=404, message=""),
    MethodNotAllowed.code: Refusal(code="UNIMPLEMENTED", status=405, message=""),
}


def _missed(request: Request, allowed: bytes | None) -> Exception:
    if allowed is None:
        return UnknownPath("send to /v1/traces, /v1/metrics or /v1/logs")
    return MethodNotAllowed(f"use {allowed.decode()}", headers=[(b"allow", allowed)])


def _check_head(request: Request) -> None:
    if _type(request) not in _TYPES:
        raise Unsupported("the content type must be application/x-protobuf or application/json")
    encoding = _encoding(request)
    if encoding not in ENCODINGS:
        known = ", ".join(sorted(name for name in ENCODINGS if name))
        raise Unsupported(f"the content encoding {encoding[:40]!r} is not supported; use {known}")


def _type(request: Request) -> bytes:
    return request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def _encoding(request: Request) -> str:
    return request.headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _taken(request: Request, signal: Signal, reply: Reply) -> Response:
    if _type(request) == _JSON:
        return Response(200, _partial_json(signal, reply), content_type=_JSON)
    body = b"" if reply is TAKEN else otlp.response(signal, reply.rejected, reply.message)
    return Response(200, body, content_type=_PROTOBUF)


def _partial_json(signal: Signal, reply: Reply) -> bytes:
    if reply is TAKEN:
        return b"{}"
    partial: dict[str, str] = {}
    if reply.rejected:
        # The JSON of protobuf writes an int64 as text.
        partial[_REJECTED[signal]] = str(reply.rejected)
    if reply.message:
        partial["errorMessage"] = reply.message
    return json.dumps({"partialSuccess": partial}).encode()


def _response(request: Request | None, refusal: Refusal, headers: HeaderList = ()) -> Response:
    """Return the response for a refusal. Its body is a `Status` in the content type of the request."""
    content_type = _JSON if request is not None and _type(request) == _JSON else _PROTOBUF
    write = status_json if content_type == _JSON else status_bytes
    body = write(refusal.code, refusal.message, refusal.retry_after_s)
    headers = list(headers)
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(refusal.retry_after_s))).encode()))
    return Response(refusal.status, body, content_type=content_type, headers=headers)


class HttpReceiver:
    """The receiver on one HTTP port."""

    def __init__(
        self,
        limiter: ReceiverLimiter,
        *,
        request_bytes_max: int,
        sites: Sites | None = None,
        reuse_port: bool = False,
    ) -> None:
        """Create the server. `sites` prevents foreign web pages from using a receiver without tokens."""
        self._limiter = limiter
        self._reuse_port = reuse_port
        limits = HttpLimits.for_bodies(request_bytes_max)
        app = OtlpApplication(limiter, request_bytes_max=request_bytes_max)
        self._listener = Listener(app, limits, sites=sites)

    async def bind(self, address: Address) -> Address:
        """Start listening and return the address with the actual port. Raise `Unavailable`."""
        try:
            host, port = await self._listener.bind(address.host, address.port, reuse_port=self._reuse_port)
        except OSError as error:
            raise Unavailable(f"cannot listen on {address}: {error.strerror or error}") from error
        return Address(host, port)

    async def drain(self, timeout_s: float) -> None:
        """Wait for active requests, and abort those that exceed the timeout."""
        self._limiter.drain()
        await self._listener.drain(timeout_s=timeout_s)
