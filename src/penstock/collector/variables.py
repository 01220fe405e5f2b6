"""`{{name}}` in a file: replaced by what `--set` or the environment says, before anything is looked at."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Final

from penstock.config import Setting
from penstock.errors import ConfigError

__all__ = ["fill"]

_VARIABLE: Final = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")


def fill(settings: Mapping[str, Setting], variables: Mapping[str, str], *, where: str) -> dict[str, Setting]:
    """The same settings with every `{{name}}` in a text replaced; keys stay as they are.

    Raises `ConfigError` naming the place and the variable that nobody has set. A value is never looked
    through again, so a variable cannot bring in another one.
    """
    return {key: _filled(value, variables, f"{where}: {key}") for key, value in settings.items()}


def _filled(value: Setting, variables: Mapping[str, str], place: str) -> Setting:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: _value(found[1], variables, place), value)
    if isinstance(value, Mapping):
        return {key: _filled(item, variables, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, variables, f"{place}.{index}") for index, item in enumerate(value)]
    return value


def _value(name: str, variables: Mapping[str, str], place: str) -> str:
    found = variables.get(name)
    if found is None:
        nearest = difflib.get_close_matches(name, variables, n=1, cutoff=0.7)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(
            f"{place}: the variable {name!r} is not set: give --set {name}=…, or put it into the "
            f"environment{hint}"
        )
    return found
