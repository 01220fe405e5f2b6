"""The errors of the event log, by what the caller should do about them.

Every error carries the `code` of the `/v0` contract and the `detail` that goes with it, so that the HTTP edge
only has to add a status. The classes derive from `penstock.errors`: `except Unavailable` keeps its meaning.
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
    """The part that all errors of this room share; always together with a class of `penstock.errors`."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, detail: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.detail = None if detail is None else dict(detail)


class InvalidRequest(TopicError, InvalidInput):
    """A name, a value or a combination of values breaks a rule of the contract."""

    code = "invalid_request"


class BatchTooLarge(TopicError, LimitExceeded):
    """More records in one write, or more sequences in one call, than the contract allows."""

    code = "batch_too_large"


class RecordTooLarge(TopicError, LimitExceeded):
    """One record is above its cap, or a write alone is larger than a topic that rejects."""

    code = "record_too_large"


class TopicNotFound(TopicError, NotFound):
    """No topic has this name."""

    code = "topic_not_found"

    def __init__(self, topic: str) -> None:
        super().__init__(f'topic "{topic}" does not exist', {"topic": topic})


class IncompatibleTopic(TopicError, Conflict):
    """The topic exists and cannot become what is asked for."""

    code = "topic_exists_incompatible"


class RouterNotFound(TopicError, NotFound):
    """No router has this name."""

    code = "router_not_found"

    def __init__(self, router: str) -> None:
        super().__init__(f'router "{router}" does not exist', {"router": router})


class RouterCycle(TopicError, Conflict):
    """The router would lead records back to where they came from, and is not allowed to."""

    code = "router_cycle"


class TopicNotEmpty(TopicError, Conflict):
    """The topic was to be deleted only if it is empty."""

    code = "topic_not_empty"


class NotAQueue(TopicError, Conflict):
    """Jobs are asked of a topic that is a log."""

    code = "not_a_queue"

    def __init__(self, topic: str) -> None:
        super().__init__(
            f'topic "{topic}" is a log; claim, ack, nack, extend and work are for queues', {"topic": topic}
        )


class TopicFull(TopicError, LimitExceeded):
    """The topic rejects new records until old ones are deleted; nothing was appended."""

    code = "topic_full"


class Throttled(TopicError, Unavailable):
    """A cap of the server is reached; nothing was applied. Retry later."""

    code = "throttled"


class CommitFailed(TopicError, Unavailable):
    """The log could not be written or made durable; nothing was published."""

    code = "internal"


class NotReady(TopicError, Unavailable):
    """The log is still being replayed."""

    code = "not_ready"


class ShuttingDown(TopicError, Unavailable):
    """The engine is closing."""

    code = "shutting_down"


class Damaged(TopicError, Corrupt):
    """Stored records cannot be read back as they were written; `detail` names topic and range."""

    code = "internal"
