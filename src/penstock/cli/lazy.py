"""A group of commands that imports a command when it is used, so that `--help` stays quick."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping

import click

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """Commands by name: where each is (`module:attribute`) and the line of help that lists it."""

    def __init__(
        self,
        name: str | None = None,
        *,
        lazy: Mapping[str, tuple[str, str]] | None = None,
        help: str | None = None,
        epilog: str | None = None,
        context_settings: dict[str, object] | None = None,
    ) -> None:
        super().__init__(name, help=help, epilog=epilog, context_settings=context_settings)
        self._lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were given: the order in which people need them."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest command named for one that does not exist."""
        if args and not args[0].startswith("-") and args[0] not in self._lazy:
            nearest = difflib.get_close_matches(args[0], list(self._lazy), n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])
