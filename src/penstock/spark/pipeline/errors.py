"""What can end a pipeline, in sentences."""

from __future__ import annotations

import re
from typing import Final

from penstock.errors import ConfigError, InvalidInput, PenstockError
from penstock.spark.session.failures import explain

__all__ = ["BadRecord", "TransformError", "explain_pipeline"]

_BAD: Final = re.compile(r"BadRecord: (record -?\d+ of sequence \d+ in shard \d+ .*?)(?: SQLSTATE|\n|$)")
_SQL: Final = re.compile(
    r"\[((?:UNRESOLVED|PARSE|DATATYPE_MISMATCH|TABLE_OR_VIEW|MISSING|AMBIGUOUS|INVALID|UNSUPPORTED)[A-Z_.]*)\]"
    r" (.*?)(?: SQLSTATE|;\n|\n|$)"
)


class BadRecord(InvalidInput):
    """A record does not decode, and the pipeline was told to stop at such a one."""


class TransformError(ConfigError):
    """The SQL of a pipeline is not valid for the columns it reads."""


def explain_pipeline(error: BaseException) -> PenstockError | None:
    """The sentence in what Spark raised while a pipeline ran, or None when it is nothing that we know."""
    text = str(error)
    bad = _BAD.search(text)
    if bad is not None:
        return BadRecord(
            f"{bad[1]}. Nothing of its micro-batch was written; on_error: dead_letter keeps such records "
            "in a table and goes on"
        )
    known = explain(error)
    if known is not None:
        return known
    sql = _SQL.search(text)
    return TransformError(f"transform: {sql[2]} ({sql[1]})") if sql is not None else None
