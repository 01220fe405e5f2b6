"""What a client raises beyond the errors of the log itself: about the way to the server and back."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import (
    LimitExceeded,
    OutcomeUnknown,
    PermissionDenied,
    Rejected,
    Unavailable,
    Unsupported,
)
from penstock.topics.errors import TopicError

__all__ = [
    "Forbidden",
    "PayloadTooLarge",
    "RequestRefused",
    "ServerFailed",
    "Unanswered",
    "Unauthorized",
    "UnexpectedAnswer",
    "Unreachable",
]


class Unauthorized(TopicError, PermissionDenied):
    """The server wants a key, or does not know this one."""

    code = "unauthorized"


class Forbidden(TopicError, PermissionDenied):
    """The key is known, but lacks the scope or may not touch this topic."""

    code = "forbidden"


class PayloadTooLarge(TopicError, LimitExceeded):
    """The request is larger than the server takes in one piece."""

    code = "payload_too_large"


class RequestRefused(TopicError, Rejected):
    """The server refuses for a reason that has no class of its own; `reason` is its code."""

    def __init__(self, message: str, detail: Mapping[str, object] | None = None, *, reason: str) -> None:
        super().__init__(message, detail)
        self.reason = reason


class ServerFailed(TopicError, Unavailable):
    """The server, or a proxy before it, failed at a call that changes nothing."""


class Unreachable(TopicError, Unavailable):
    """There was no answer, and nothing was applied."""


class UnexpectedAnswer(TopicError, Unsupported):
    """What answers at this address does not speak the contract."""


class Unanswered(TopicError, OutcomeUnknown):
    """A call that changes something was sent and never answered: look before sending it again."""
