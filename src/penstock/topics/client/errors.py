"""Errors of the client, and the possible effect of a failed attempt."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import httpx
import msgspec

from penstock.errors import (
    LimitExceeded,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    Rejected,
    Unavailable,
    Unsupported,
)
from penstock.topics import errors
from penstock.topics.errors import TopicError


class Unauthorized(TopicError, PermissionDenied):
    """The server requires a key, or does not know this one."""

    code = "unauthorized"


class Forbidden(TopicError, PermissionDenied):
    """The key is known, but lacks the scope or may not access this topic."""

    code = "forbidden"


class PayloadTooLarge(TopicError, LimitExceeded):
    """The request exceeds the server's size limit."""

    code = "payload_too_large"


class RequestRefused(TopicError, Rejected):
    """The server refuses for a reason without an error class. `reason` is its code."""

    def __init__(self, message: str, detail: Mapping[str, object] | None = None, *, reason: str) -> None:
        super().__init__(message, detail)
        self.reason = reason


class ServerFailed(TopicError, Unavailable):
    """The server or a proxy in front of it failed a call that changes nothing."""


class Unreachable(TopicError, Unavailable):
    """There was no response, and nothing was applied."""


class UnexpectedAnswer(TopicError, Unsupported):
    """The server at this address does not implement the contract."""


class Unanswered(TopicError, OutcomeUnknown):
    """A changing call was sent and not answered. Check its effect before sending it again."""


_RETRY_AFTER_S_MAX: Final = 60.0
_SERVER_ERROR: Final = 500
_NOTHING_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Effect(enum.Enum):
    """The effect that a failed attempt may have had."""

    NONE = "the server did not act on it; the same call may succeed later"
    UNKNOWN = "it may have been applied"
    REFUSED = "the server did not act on it, and never will"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed attempt. `error` is raised if it was the last one."""

    error: PenstockError
    effect: Effect
    retry_after_s: float = 0.0


class _Problem(msgspec.Struct):
    code: str
    message: str
    detail: dict[str, object] | None = None


class _ErrorBody(msgspec.Struct):
    error: _Problem


_BODY: Final = msgspec.json.Decoder(_ErrorBody)
_REFUSALS: Final[Mapping[str, type[errors.TopicError]]] = {
    kind.code: kind
    for kind in (
        errors.InvalidRequest,
        errors.BatchTooLarge,
        errors.RecordTooLarge,
        errors.IncompatibleTopic,
        errors.RouterCycle,
        errors.TopicNotEmpty,
        errors.TopicFull,
        Unauthorized,
        Forbidden,
        PayloadTooLarge,
    )
}
_DELAYS: Final[Mapping[str, type[errors.TopicError]]] = {
    kind.code: kind for kind in (errors.Throttled, errors.NotReady, errors.ShuttingDown)
}


def failure_of_answer(response: httpx.Response, topic: str | None, *, changes: bool) -> Failure:
    """Interpret an unsuccessful response. `changes` says whether the call changes something."""
    try:
        problem = _BODY.decode(response.content).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _failure_of_stranger(response, changes=changes)
    message, detail = problem.message, problem.detail
    if problem.code in _DELAYS:
        after_s = _retry_after_s(response.headers, detail)
        return Failure(
            error=_made(_DELAYS[problem.code], message, detail), effect=Effect.NONE, retry_after_s=after_s
        )
    if response.status_code >= _SERVER_ERROR:
        return _failure_of_server(problem, changes=changes)
    if problem.code == errors.TopicNotFound.code:
        named = (detail or {}).get("topic", topic)
        return Failure(error=errors.TopicNotFound(str(named)), effect=Effect.REFUSED)
    if problem.code == errors.RouterNotFound.code:
        named = (detail or {}).get("router", "")
        return Failure(error=errors.RouterNotFound(str(named)), effect=Effect.REFUSED)
    if problem.code == errors.NotAQueue.code:
        return Failure(error=errors.NotAQueue(str((detail or {}).get("topic", topic))), effect=Effect.REFUSED)
    if problem.code in _REFUSALS:
        return Failure(error=_made(_REFUSALS[problem.code], message, detail), effect=Effect.REFUSED)
    return Failure(error=RequestRefused(message, detail, reason=problem.code), effect=Effect.REFUSED)


def failure_of_transport(error: httpx.HTTPError, url: str, *, changes: bool) -> Failure:
    """Interpret a call without a response."""
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.UnsupportedProtocol | httpx.DecodingError | httpx.TooManyRedirects):
        return Failure(error=UnexpectedAnswer(f"{url}: {reason}"), effect=Effect.REFUSED)
    if isinstance(error, _NOTHING_SENT):
        return Failure(error=Unreachable(f"no connection to {url}: {reason}"), effect=Effect.NONE)
    if changes:
        return Failure(
            error=Unanswered(
                f"{url} received the call and did not answer ({reason}); it may have been applied"
            ),
            effect=Effect.UNKNOWN,
        )
    return Failure(error=Unreachable(f"no answer from {url}: {reason}"), effect=Effect.UNKNOWN)


def _failure_of_stranger(response: httpx.Response, *, changes: bool) -> Failure:
    """Interpret a response without the contract's body, from a proxy or another kind of server."""
    text = f"{response.url.copy_with(query=None)} answered {response.status_code}"
    if response.status_code >= _SERVER_ERROR:
        kind = Unanswered if changes else ServerFailed
        return Failure(error=kind(f"{text} without a reason"), effect=Effect.UNKNOWN)
    return Failure(
        error=UnexpectedAnswer(f"{text}, which is not a response of a topics server; check the address"),
        effect=Effect.REFUSED,
    )


def _failure_of_server(problem: _Problem, *, changes: bool) -> Failure:
    if _is_damage(problem.detail or {}, changes=changes):
        # Records are read before anything changes, and another read finds the same bytes.
        return Failure(error=errors.Damaged(problem.message, problem.detail), effect=Effect.REFUSED)
    kind = errors.CommitFailed if changes else ServerFailed
    return Failure(error=kind(problem.message, problem.detail), effect=Effect.UNKNOWN)


def _is_damage(detail: Mapping[str, object], *, changes: bool) -> bool:
    """Return whether an `internal` error is about stored records: it then names their topic and range."""
    return "topic" in detail and (not changes or "first_seq" in detail)


def _made(kind: type[errors.TopicError], message: str, detail: Mapping[str, object] | None) -> PenstockError:
    error = kind(message, detail)
    assert isinstance(error, PenstockError)
    return error


def _retry_after_s(headers: httpx.Headers, detail: Mapping[str, object] | None) -> float:
    """Return the retry delay that the server asks for. Of two values, the more precise one counts."""
    delay_ms = (detail or {}).get("retry_after_ms")
    if isinstance(delay_ms, int | float):
        return _bounded(delay_ms / 1000)
    try:
        return _bounded(float(headers.get("retry-after", "1")))
    except ValueError:
        return 1.0


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), _RETRY_AFTER_S_MAX) if math.isfinite(seconds) else 1.0
