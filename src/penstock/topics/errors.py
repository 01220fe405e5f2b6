"""The errors of the event log, grouped by what the caller should do about them.

Every error carries the `code` of the `/v0` contract and its `detail`, so the HTTP layer only adds a status.
The classes derive from `penstock.errors`: `except Unavailable` keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.errors import Conflict, Corrupt, InvalidInput, LimitExceeded, NotFound, Unavailable

__all__ = [
    "BatchTooLarge",
    "CommitFailed",
    "Damaged",
    "IncompatibleTopic",
    "InvalidRequest",
    "NotAQueue",
    "NotReady",
    "RecordTooLarge",
    "RouterCycle",
    "RouterNotFound",
    "ShuttingDown",
    "Throttled",
    "TopicError",
    "TopicFull",
    "TopicNotEmpty",
    "TopicNotFound",
]


class TopicError(Exception):
    """The base of all errors of this package. It is always combined with a class of `penstock.errors`."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, detail: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.detail = None if detail is None else dict(detail)


class InvalidRequest(TopicError, InvalidInput):
    """A name, a value or a combination of values violates a rule of the contract."""

    code = "invalid_request"


class BatchTooLarge(TopicError, LimitExceeded):
    """More records in one write, or more sequence numbers in one call, than the contract allows."""

    code = "batch_too_large"


class RecordTooLarge(TopicError, LimitExceeded):
    """A record exceeds its size limit, or a single write exceeds the caps of a topic that rejects."""

    code = "record_too_large"


class TopicNotFound(TopicError, NotFound):
    """No topic has this name."""

    code = "topic_not_found"

    def __init__(self, topic: str) -> None:
        super().__init__(f'topic "{topic}" does not exist', {"topic": topic})


class IncompatibleTopic(TopicError, Conflict):
    """The topic exists and cannot be changed as requested."""

    code = "topic_exists_incompatible"


class RouterNotFound(TopicError, NotFound):
    """No router has this name."""

    code = "router_not_found"

    def __init__(self, router: str) -> None:
        super().__init__(f'router "{router}" does not exist', {"router": router})


class RouterCycle(TopicError, Conflict):
    """The router would copy records back to their source, and its config does not allow this."""

    code = "router_cycle"


class TopicNotEmpty(TopicError, Conflict):
    """The topic has records, and was to be deleted only if empty."""

    code = "topic_not_empty"


class NotAQueue(TopicError, Conflict):
    """A queue operation was called on a topic that is a log."""

    code = "not_a_queue"

    def __init__(self, topic: str) -> None:
        super().__init__(
            f'topic "{topic}" is a log; claim, ack, nack, extend and work are for queues', {"topic": topic}
        )


class TopicFull(TopicError, LimitExceeded):
    """The topic rejects new records until old ones are deleted. Nothing was appended."""

    code = "topic_full"


class Throttled(TopicError, Unavailable):
    """A limit of the server is reached. Nothing was applied; retry later."""

    code = "throttled"


class CommitFailed(TopicError, Unavailable):
    """The log could not be written or synced. Nothing was published."""

    code = "internal"


class NotReady(TopicError, Unavailable):
    """The log is still being replayed."""

    code = "not_ready"


class ShuttingDown(TopicError, Unavailable):
    """The engine is closing."""

    code = "shutting_down"


class Damaged(TopicError, Corrupt):
    """Stored records cannot be read as they were written. `detail` names their topic and range."""

    code = "internal"
