"""Settings from a YAML file, the environment and flags, built into frozen dataclasses.

    layers = merge(load_mapping(path), from_env("PENSTOCK_", os.environ), flags)
    settings = build(Settings, layers, where=str(path))

Nothing is guessed. An error for an unknown key states its place and the closest known key; an error for a
wrong value states the expected type. Every failure is a `ConfigError`.

`msgspec` checks and converts single values. This module walks the structure around them, because msgspec
ignores unknown keys of a dataclass, omits mapping keys from error paths, and stops at the first error.

This module only checks sizes and durations, because it knows their place. The constructor of a class converts
them, so that code and files use the same notation: see `penstock.units`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

import msgspec

from penstock.errors import ConfigError
from penstock.units import DurationLike, SizeLike, parse_duration, parse_size

if TYPE_CHECKING:
    import yaml

__all__ = [
    "Secret",
    "Setting",
    "build",
    "check_whole_numbers",
    "closest",
    "faults",
    "from_env",
    "load_mapping",
    "mask",
    "merge",
    "unknown_key",
]

Setting: TypeAlias = object
"""The value of a key: text, a number, a flag, None, a list or a nested mapping."""

T = TypeVar("T")

_MASK: Final = "***"
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"
_FLAGS: Final = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)


class Secret:
    """Text that is never shown in logs, errors or `repr`; only `reveal()` returns it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return _MASK

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(_MASK, spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __bool__(self) -> bool:
        return bool(self._text)

    def __reduce__(self) -> typing.NoReturn:
        raise TypeError("a Secret cannot be pickled: it would be written in the clear")


def mask(text: str | None) -> str:
    """Return a placeholder that shows only whether the secret is set."""
    return _MASK if text else "(not set)"


def load_mapping(path: str | Path) -> dict[str, Setting]:
    """Read a YAML file that holds a mapping; an empty file is an empty mapping.

    Raise `ConfigError` if the file cannot be read, is not YAML, repeats a key, or is not a mapping.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        loaded = _strict_loader()(text).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # The full error text quotes the line, which may contain a secret.
        raise ConfigError(f"{path}: not valid YAML: {_yaml_problem(error)}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {_kind(loaded)}")
    return _text_keys(loaded, str(path))


def _yaml_problem(error: Exception) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "context", None)
    mark = getattr(error, "problem_mark", None)
    if problem is None:
        return "it cannot be parsed" if mark is not None else str(error).partition("\n")[0]
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else str(problem)


def merge(*layers: Mapping[str, Setting]) -> dict[str, Setting]:
    """Merge layers into one mapping. Later layers win; nested mappings are merged key by key."""
    merged: dict[str, Setting] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            if isinstance(value, Mapping):
                merged[key] = merge(below, value) if isinstance(below, Mapping) else merge(value)
            else:
                merged[key] = value
    return merged


def from_env(prefix: str, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Read settings from the environment: `PENSTOCK_BUFFER__FLUSH_INTERVAL=1s` sets `buffer.flush_interval`.

    Raise `ConfigError` if one variable sets a value and another one sets a key below it.
    """
    layer: dict[str, Setting] = {}
    for name in sorted(environ):
        if name.startswith(prefix) and name != prefix:
            _put(layer, name[len(prefix) :].lower().split("__"), environ[name], name)
    return layer


def build(cls: type[T], mapping: Mapping[str, Setting], *, where: str) -> T:
    """Decode `mapping` into the dataclass `cls`; every error message starts with `where`.

    Text is converted to the type of its field, so that the environment can set numbers and flags. An error
    raised by a constructor is reported with its place.
    """
    decoder = _Decoder()
    settings = decoder.decode(cls, mapping, _Place(where))
    if decoder.faults:
        raise decoder.faults[0]
    return typing.cast(T, settings)


def faults(cls: type, mapping: Mapping[str, Setting], *, where: str) -> list[ConfigError]:
    """Return every error that `build` would raise for `mapping`; an empty list if it is valid.

    The constructor of a dataclass runs only if all its fields are valid.
    """
    decoder = _Decoder()
    decoder.decode(cls, mapping, _Place(where))
    return decoder.faults


def unknown_key(place: str, key: str, known: Iterable[str]) -> ConfigError:
    """Return an error for an unknown key that names the closest known key, or all known keys."""
    names = sorted(known)
    near = closest(key, names)
    hint = f"did you mean {near!r}?" if near else f"expected one of {', '.join(names) or '(none)'}"
    return ConfigError(f"{place}: unknown key, {hint}")


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the most similar choice, or None if none is similar."""
    import difflib  # slow to import, and only needed for an error message

    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)), None)


def check_whole_numbers(settings: object, least: int, *names: str) -> None:
    """Raise `ConfigError` unless each named field is a whole number of at least `least`."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """The file or layer of a value, and the path of keys to it."""

    where: str
    keys: tuple[str, ...] = ()

    def at(self, key: object) -> _Place:
        return _Place(self.where, (*self.keys, str(key)))

    def __str__(self) -> str:
        return f"{self.where}: {'.'.join(self.keys)}" if self.keys else self.where


class _Decoder:
    """Decodes settings by type and collects the errors, each with its place.

    The return value of a method that recorded an error is not used.
    """

    def __init__(self) -> None:
        self.faults: list[ConfigError] = []

    def decode(self, hint: object, value: Setting, place: _Place) -> Setting:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if isinstance(hint, typing.NewType):
            return self.decode(hint.__supertype__, value, place)
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments, value, place)
        if origin in (list, tuple):
            return self._sequence(origin, arguments[0], value, place)
        if origin is dict or getattr(origin, "__name__", "") == "Mapping":
            return self._mapping(arguments[1], value, place)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return value if isinstance(value, hint) else self._dataclass(hint, value, place)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return self._enum(hint, value, place)
        return self._scalar(hint, value, place)

    def _dataclass(self, cls: type, value: Setting, place: _Place) -> Setting:
        if not isinstance(value, Mapping):
            return self._refuse(place, "a mapping of settings", value)
        before = len(self.faults)
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        hints = _hints(cls)
        self.faults += [
            unknown_key(str(place.at(key)), str(key), fields) for key in value if key not in fields
        ]
        decoded = {
            key: self.decode(hints[key], item, place.at(key)) for key, item in value.items() if key in fields
        }
        for name, field in fields.items():
            if name not in value and _is_required(field):
                self.faults.append(ConfigError(f"{place.at(name)}: required, but not set"))
        if len(self.faults) > before:
            return None
        try:
            return typing.cast(Setting, cls(**decoded))
        except ConfigError as error:
            fault = ConfigError(f"{place}: {error}")
            fault.__cause__ = error
            self.faults.append(fault)
            return None

    def _union(self, choices: tuple[object, ...], value: Setting, place: _Place) -> Setting:
        wanted = [choice for choice in choices if choice is not types.NoneType]
        if value is None and len(wanted) < len(choices):
            return None
        for units, parse in _UNITS:
            if frozenset(wanted) == units:
                return self._unit(parse, value, place)
        # A value that already has one of the types stays as it is: "5" is text where text is allowed.
        if any(type(value) is choice for choice in wanted):
            return value
        nested = [choice for choice in wanted if dataclasses.is_dataclass(choice)]
        if len(wanted) == 1 or (len(nested) == 1 and isinstance(value, Mapping)):
            return self.decode((nested or wanted)[0], value, place)
        for choice in wanted:
            attempt = _Decoder()
            decoded = attempt.decode(choice, value, place)
            if not attempt.faults:
                return decoded
        return self._refuse(place, " or ".join(_name(choice) for choice in wanted), value)

    def _sequence(self, origin: type, item: object, value: Setting, place: _Place) -> Setting:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")] if value.strip() else []
        if not isinstance(value, list | tuple):
            return self._refuse(place, "a list", value)
        return origin([self.decode(item, part, place.at(index)) for index, part in enumerate(value)])

    def _mapping(self, item: object, value: Setting, place: _Place) -> Setting:
        if not isinstance(value, Mapping):
            return self._refuse(place, "a mapping", value)
        return {str(key): self.decode(item, part, place.at(key)) for key, part in value.items()}

    def _enum(self, hint: type[enum.Enum], value: Setting, place: _Place) -> Setting:
        if isinstance(value, hint):
            return value
        for member in hint:
            if value == member.value or (isinstance(value, str) and value.lower() == member.name.lower()):
                return member
        return self._refuse_choice(place, [member.name.lower() for member in hint], value)

    def _unit(self, parse: Callable[[typing.Any], float], value: Setting, place: _Place) -> Setting:
        """Check a size or duration here, where its place is known; the constructor converts it."""
        try:
            parse(value)
        except ConfigError as error:
            self.faults.append(ConfigError(f"{place}: {error}"))
        return value

    def _scalar(self, hint: object, value: Setting, place: _Place) -> Setting:
        if hint is object:
            return value
        if isinstance(value, str) and hint in _OF_TEXT:
            with contextlib.suppress(ValueError):
                value = _OF_TEXT[hint](value)
        try:
            return typing.cast(Setting, msgspec.convert(value, typing.cast(type, hint), dec_hook=_custom))
        except msgspec.ValidationError:
            pass
        if hint is Secret:  # do not show the value
            self.faults.append(ConfigError(f"{place}: expected text (put it in quotes)"))
            return None
        if typing.get_origin(hint) is Literal:
            return self._refuse_choice(place, [str(choice) for choice in typing.get_args(hint)], value)
        return self._refuse(place, _name(hint), value)

    def _refuse_choice(self, place: _Place, choices: list[str], value: Setting) -> Setting:
        near = closest(str(value), choices)
        hint = f"; did you mean {near!r}?" if near else ""
        found = f"expected one of {', '.join(choices)}, found {_kind(value)}{hint}"
        self.faults.append(ConfigError(f"{place}: {found}"))
        return None

    def _refuse(self, place: _Place, expected: str, value: Setting) -> Setting:
        self.faults.append(ConfigError(f"{place}: expected {expected}, found {_kind(value)}"))
        return None


def _flag(text: str) -> bool | str:
    return _FLAGS.get(text.lower(), text)


_OF_TEXT: Final[Mapping[object, Callable[[str], Setting]]] = {bool: _flag, int: int, float: float}
"""Converters for environment text of types that YAML writes natively."""

_UNITS: Final[tuple[tuple[frozenset[object], Callable[[typing.Any], float]], ...]] = (
    (frozenset(typing.get_args(DurationLike)), parse_duration),
    (frozenset(typing.get_args(SizeLike)), parse_size),
)


def _custom(kind: type, value: Setting) -> Setting:
    """Decode types that msgspec does not support; it reports a `ValueError` as its own error."""
    if isinstance(value, kind):
        return value
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise ValueError


@cache
def _hints(cls: type) -> dict[str, object]:
    return typing.get_type_hints(cls)


def _is_required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _name(hint: object) -> str:
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    if isinstance(hint, type):
        return names.get(hint, f"a {hint.__name__}")
    return str(hint)


def _kind(value: Setting) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return repr(value)


def _put(layer: dict[str, Setting], keys: list[str], value: str, name: str) -> None:
    if not all(keys):
        raise ConfigError(f"environment: {name}: an empty key between double underscores")
    for key in keys[:-1]:
        below = layer.setdefault(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"environment: {name}: nests below a variable that holds a value")
        layer = below
    if isinstance(layer.get(keys[-1]), dict):
        raise ConfigError(f"environment: {name}: holds a value where other variables nest")
    layer[keys[-1]] = value


def _text_keys(mapping: Mapping[object, object], where: str) -> dict[str, Setting]:
    checked: dict[str, Setting] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise ConfigError(f"{where}: key {key!r} is not text; put it in quotes")
        checked[key] = _text_keys(value, f"{where}: {key}") if isinstance(value, dict) else value
    return checked


@cache
def _strict_loader() -> type[yaml.SafeLoader]:
    """Return YAML's safe loader, extended to reject repeated keys."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        def construct_mapping(
            self, node: yaml.MappingNode, deep: bool = False
        ) -> dict[typing.Hashable, object]:
            seen: set[str] = set()
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE_TAG:
                    continue
                if key_node.value in seen:
                    problem = f"key {key_node.value!r} appears twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key_node.value)
            return super().construct_mapping(node, deep=deep)

    return StrictLoader
