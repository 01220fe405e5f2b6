"""The buffer's errors. Each also has a base class in `penstock.errors`, which says how to respond to it.

    BufferError
    ├── InvalidInputError    (Rejected)        the call itself is wrong
    ├── SerializationError   (Corrupt)         stored bytes break the format
    ├── FencedError          (Fenced)          a newer consumer took over: stop
    └── StorageError                           the store, or the order of calls
        ├── StorageRejected      (Rejected)        the store refuses: credentials, bucket, capability
        ├── StorageUnavailable   (Unavailable)     a passing fault; produce again or wait
        │   └── RetriesExhausted                   the fault lasted until the deadline
        ├── OutcomeUnknown       (OutcomeUnknown)  the append may be in the queue: verify
        ├── BatchMissing         (Corrupt)         the queue names an object that does not exist
        ├── OutOfOrderAck        (Rejected)        acks follow delivery order
        ├── ManifestFull         (LimitExceeded)   the consumer lags too far
        ├── StaleTransaction     (Rejected)        a later version of the same application is committed
        └── ProducerClosed       (Rejected)        the producer is shut down

Only `FencedError` is terminal for a consumer.
"""

from __future__ import annotations

from penstock import errors


class BufferError(errors.PenstockError):
    """The base of all errors of the buffer."""


class InvalidInputError(BufferError, errors.InvalidInput):
    """The call breaks a rule of the format or of the API; nothing was queued."""


class SerializationError(BufferError, errors.Corrupt):
    """A manifest or a batch breaks its format. The bytes stay in place."""


class FencedError(BufferError, errors.Fenced):
    """The consumer does not own the queue: it was superseded, closed, not initialised, or lost its manifest.

    Stop it. A write that was sent just before may have taken effect, but must not be relied upon.
    """


class StorageError(BufferError):
    """The store failed, or a call came out of order."""


class StorageRejected(StorageError, errors.Rejected):
    """The store refuses permanently: wrong credentials, missing bucket, missing capability."""


class StorageUnavailable(StorageError, errors.Unavailable):
    """The store cannot be reached or is overloaded; nothing was queued."""


class RetriesExhausted(StorageUnavailable):
    """The store did not recover before the deadline; nothing was queued."""


class OutcomeUnknown(StorageError, errors.OutcomeUnknown):
    """The append may be in the queue. Look for the location before producing the records again."""


class BatchMissing(StorageError, errors.Corrupt):
    """The manifest names a batch object that does not exist."""


class OutOfOrderAck(StorageError, errors.Rejected):
    """Acks must follow the order of delivery, one by one."""


class ManifestFull(StorageError, errors.LimitExceeded):
    """The manifest reached its cap because nothing is dequeued: start or unblock the consumer."""


class StaleTransaction(StorageError, errors.Rejected):
    """A later version of the same application is committed; nothing was queued. Use the right checkpoint."""


class ProducerClosed(StorageError, errors.Rejected):
    """The producer is shut down and takes no more records."""


def storage_error(cause: errors.PenstockError, doing: str) -> BufferError:
    """Convert an error of a lower layer into a `BufferError`, and add the operation to its message."""
    if isinstance(cause, BufferError):
        return cause
    text = f"{doing}: {cause}"
    if isinstance(cause, errors.Corrupt):
        return SerializationError(text)
    if isinstance(cause, errors.OutcomeUnknown):
        return OutcomeUnknown(text)
    if isinstance(cause, errors.Rejected):
        return StorageRejected(text)
    return StorageUnavailable(text)
