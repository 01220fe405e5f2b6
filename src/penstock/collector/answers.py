"""What a receiver answers to each fault: one table for gRPC and HTTP. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock import errors
from penstock.quiver.errors import Closed

__all__ = ["RETRY_AFTER_S", "Draining", "Refusal", "Unauthorized", "refusal_of"]

RETRY_AFTER_S: Final = 1.0
"""The hint where the fault itself names none."""


class Draining(errors.Unavailable):
    """The collector is about to stop and takes nothing more."""


class Unauthorized(errors.PermissionDenied):
    """A token is missing or not known here; other rights that are missing are ours, on a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that was not taken: the gRPC code, the HTTP status, the words, and when to come again."""

    code: str
    status: int
    message: str
    retry_after_s: float | None = None

    @property
    def may_retry(self) -> bool:
        return self.retry_after_s is not None


def refusal_of(error: BaseException) -> Refusal:
    """The answer to what taking a request has raised.

    A fault that may pass is never a 500: clients must not repeat that one. Too large is final, and says so
    by carrying no hint. A message of our own errors is meant for the client; that of a bug is not.
    """
    message = errors.public_text(error)
    if isinstance(error, Closed):
        words = "the collector is stopping"
        return Refusal(code="UNAVAILABLE", status=503, message=words, retry_after_s=RETRY_AFTER_S)
    if isinstance(error, errors.LimitExceeded):
        return Refusal(code="RESOURCE_EXHAUSTED", status=413, message=message)
    if isinstance(error, errors.Unsupported):
        return Refusal(code="UNIMPLEMENTED", status=415, message=message)
    if isinstance(error, Unauthorized):
        return Refusal(code="UNAUTHENTICATED", status=401, message=message)
    if isinstance(error, errors.InvalidInput):
        return Refusal(code="INVALID_ARGUMENT", status=400, message=message)
    if isinstance(error, errors.Unavailable | errors.Conflict | errors.OutcomeUnknown):
        return Refusal(code="UNAVAILABLE", status=503, message=message, retry_after_s=_hint(error))
    if isinstance(error, errors.PenstockError):
        # The disk or the directory is in trouble, not the request: another collector, or this one after a
        # restart, may well take it.
        words = "the collector cannot store at the moment"
        return Refusal(code="UNAVAILABLE", status=503, message=words, retry_after_s=RETRY_AFTER_S)
    return Refusal(code="INTERNAL", status=500, message="an error of the collector; its log tells more")


def _hint(error: BaseException) -> float:
    for name in ("retry_after_s", "retry_after"):
        hint = getattr(error, name, None)
        if isinstance(hint, int | float) and not isinstance(hint, bool) and hint > 0:
            return float(hint)
    return RETRY_AFTER_S
