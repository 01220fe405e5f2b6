"""What can be wrong with a query.

InvalidInput
├── ParseError          the text is no query; the message starts with line and column
└── BadRange            the steps asked for cannot be evaluated
Unsupported
└── UnsupportedQuery    a query, but of a part of the language that is not here
Rejected
└── ExecutionError      the data do not allow an answer (several series where one is needed)
LimitExceeded
├── TooManySamples      the query would hold more samples than allowed
└── QueryTimeout        the query took longer than allowed
"""

from __future__ import annotations

from penstock.errors import InvalidInput, LimitExceeded, Rejected, Unsupported

__all__ = [
    "BadRange",
    "ExecutionError",
    "ParseError",
    "QueryTimeout",
    "TooManySamples",
    "UnsupportedQuery",
]


class ParseError(InvalidInput):
    """The text is no query. `line` and `column` count from 1 and point at what does not fit."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"{line}:{column}: parse error: {message}")
        self.line = line
        self.column = column


class BadRange(InvalidInput):
    """The end is before the start, the step is not positive, or there are too many steps."""


class UnsupportedQuery(Unsupported):
    """A part of the language that is not here; the message names it."""


class ExecutionError(Rejected):
    """The data do not allow an answer, such as several matches where there may be one."""


class TooManySamples(LimitExceeded):
    """The query would hold more samples in memory than allowed."""


class QueryTimeout(LimitExceeded):
    """The query took longer than allowed."""
