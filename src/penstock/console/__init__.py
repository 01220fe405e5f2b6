"""The console: what runs, how records flow, and where each of them is."""

from __future__ import annotations

from penstock.console.console import Console
from penstock.console.settings import DEFAULT_PORT, KEYS_VARIABLE, ConsoleSettings

__all__ = ["DEFAULT_PORT", "KEYS_VARIABLE", "Console", "ConsoleSettings"]
