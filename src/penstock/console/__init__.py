"""The console, which shows the parts of a fleet, the flow of records, and the path of each record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.console.access import DEFAULT_PORT, KEYS_VARIABLE, Access, ConsoleSettings
    from penstock.console.console import Console

__all__ = ["DEFAULT_PORT", "KEYS_VARIABLE", "Access", "Console", "ConsoleSettings"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "access": "DEFAULT_PORT KEYS_VARIABLE Access ConsoleSettings",
            "console": "Console",
        },
    )
