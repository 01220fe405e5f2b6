"""Settings from a YAML file, the environment and flags, built into frozen dataclasses.

    layers = merge(load_mapping(path), from_env("PENSTOCK_", os.environ), flags)
    settings = build(Settings, layers, where=str(path))

Nothing is guessed: an unknown key names its place and the nearest right one, a wrong value says what
was expected. Every failure is a `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import yaml

__all__ = [
    "Secret",
    "Setting",
    "build",
    "closest",
    "faults",
    "from_env",
    "load_mapping",
    "mask",
    "merge",
    "unknown_key",
]

Setting: TypeAlias = object
"""What a layer holds at a key: text, a number, a flag, None, a list or a nested mapping."""

T = TypeVar("T")

_MASK = "***"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


class Secret:
    """Text that stays out of logs, errors and `repr`; `reveal()` is the only way to it."""

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
    """What to show instead of a secret: nothing about it but whether it is set."""
    return _MASK if text else "(not set)"


def load_mapping(path: str | Path) -> dict[str, Setting]:
    """The mapping in a YAML file (an empty file is an empty mapping).

    Raises `ConfigError` if the file cannot be read, is not YAML, repeats a key, or holds no mapping.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        loaded = _strict_loader()(text).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # Not its whole text: that quotes the line, which may hold a secret.
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
    """One mapping out of several: later layers win, nested mappings merge key by key."""
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
    """The layer in the environment: `PENSTOCK_BUFFER__FLUSH_INTERVAL=1s` is `buffer.flush_interval`.

    Raises `ConfigError` if one variable sets a value where another one nests.
    """
    layer: dict[str, Setting] = {}
    for name in sorted(environ):
        if name.startswith(prefix) and name != prefix:
            _put(layer, name[len(prefix) :].lower().split("__"), environ[name], name)
    return layer


def build(cls: type[T], mapping: Mapping[str, Setting], *, where: str) -> T:
    """`cls` (a dataclass) from `mapping`, checked field by field; `where` starts every message.

    Text is converted to the field's type, so that the environment can set numbers and flags. An error
    raised by the dataclass itself is told with its place.
    """
    return typing.cast(T, _dataclass(cls, mapping, _Place(where, ())))


def faults(cls: type, mapping: Mapping[str, Setting], *, where: str) -> list[ConfigError]:
    """Everything for which `build` would refuse `mapping`, each key by itself; nothing if it would not.

    What a dataclass says of its fields together is asked only when each of them is right.
    """
    return list(_faults(cls, mapping, _Place(where, ())))


def _faults(hint: object, value: Setting, place: _Place) -> Iterator[ConfigError]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        classes = [choice for choice in arguments if dataclasses.is_dataclass(choice)]
        hint = classes[0] if len(classes) == 1 and isinstance(value, Mapping) else hint
    found: list[ConfigError] = []
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        known = {field.name for field in dataclasses.fields(hint) if field.init}
        inner = [(_hints(hint)[key], item, place.at(key)) for key, item in value.items() if key in known]
        unknown = [key for key in value if key not in known]
        found += [unknown_key(str(place.at(str(key))), str(key), known) for key in unknown]
        missing = [field.name for field in dataclasses.fields(hint) if field.init and _required(field)]
        found += [_not_set(place.at(name)) for name in missing if name not in value]
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        inner = [(arguments[0], item, place.at(str(index))) for index, item in enumerate(value)]
    elif _is_mapping(origin) and isinstance(value, Mapping):
        inner = [(arguments[1], item, place.at(str(key))) for key, item in value.items()]
    else:
        inner = []
    for kind, item, at in inner:
        found += _faults(kind, item, at)
    if not found:
        try:
            _convert(hint, value, place)
        except ConfigError as error:
            found.append(error)
    yield from found


def unknown_key(place: str, key: str, known: Iterable[str]) -> ConfigError:
    """The error for a key nobody knows, naming the nearest one that is known."""
    names = sorted(known)
    near = closest(key, names)
    hint = f"did you mean {near!r}?" if near else f"expected one of {', '.join(names) or '(none)'}"
    return ConfigError(f"{place}: unknown key, {hint}")


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `word` was probably meant to be, or None if none is similar."""
    import difflib  # slow to import, and needed only for an error message

    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)), None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a value stands: the file or layer, then the keys that lead to it."""

    where: str
    keys: tuple[str, ...]

    def at(self, key: str) -> _Place:
        return _Place(self.where, (*self.keys, key))

    def __str__(self) -> str:
        return f"{self.where}: {'.'.join(self.keys)}" if self.keys else self.where

    def wrong(self, value: Setting, expected: str) -> ConfigError:
        return ConfigError(f"{self}: expected {expected}, found {_kind(value)}")


def _dataclass(cls: type, value: Setting, place: _Place) -> object:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls!r} is not a dataclass")
    if not isinstance(value, Mapping):
        raise place.wrong(value, "a mapping of settings")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in value:
        if key not in fields:
            raise unknown_key(str(place.at(str(key))), str(key), fields)
    hints = _hints(cls)
    built = {key: _convert(hints[key], item, place.at(key)) for key, item in value.items()}
    for name, field in fields.items():
        if name not in built and _required(field):
            raise _not_set(place.at(name))
    try:
        return cls(**built)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _not_set(place: _Place) -> ConfigError:
    return ConfigError(f"{place}: required, but not set")


@cache
def _hints(cls: type) -> dict[str, object]:
    return typing.get_type_hints(cls)


def _required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(hint: object, value: Setting, place: _Place) -> Setting:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, typing.NewType):
        return _convert(hint.__supertype__, value, place)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, value, place)
    if origin is typing.Literal:
        return _literal(arguments, value, place)
    if origin in (list, tuple):
        return _sequence(origin, arguments, value, place)
    if _is_mapping(origin):
        return _mapping(arguments[1], value, place)
    if isinstance(hint, type):
        return _class(hint, value, place)
    raise TypeError(f"{place}: settings of type {hint!r} are not supported")


def _is_mapping(origin: object) -> bool:
    return origin is dict or getattr(origin, "__name__", "") == "Mapping"


def _class(hint: type, value: Setting, place: _Place) -> Setting:
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else _dataclass(hint, value, place)
    if issubclass(hint, enum.Enum):
        return _enum(hint, value, place)
    scalar = _SCALARS.get(hint)
    if scalar is not None:
        return scalar(value, place)
    if isinstance(value, hint):
        return value
    raise place.wrong(value, f"a {hint.__name__}")


def _union(choices: tuple[object, ...], value: Setting, place: _Place) -> Setting:
    if value is None and types.NoneType in choices:
        return None
    # A value that already has one of the types stays as it is: "5" is text where text is allowed.
    if any(isinstance(choice, type) and type(value) is choice for choice in choices):
        return value
    wanted = [choice for choice in choices if choice is not types.NoneType]
    errors: list[ConfigError] = []
    for choice in wanted:
        try:
            return _convert(choice, value, place)
        except ConfigError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    raise place.wrong(value, " or ".join(_name(choice) for choice in wanted))


def _literal(choices: tuple[object, ...], value: Setting, place: _Place) -> Setting:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    raise _no_choice(place, value, [str(choice) for choice in choices])


def _enum(hint: type[enum.Enum], value: Setting, place: _Place) -> Setting:
    if isinstance(value, hint):
        return value
    for member in hint:
        if value == member.value or (isinstance(value, str) and value.lower() == member.name.lower()):
            return member
    raise _no_choice(place, value, [member.name.lower() for member in hint])


def _no_choice(place: _Place, value: Setting, choices: list[str]) -> ConfigError:
    near = closest(str(value), choices)
    hint = f"; did you mean {near!r}?" if near else ""
    return ConfigError(f"{place}: expected one of {', '.join(choices)}, found {_kind(value)}{hint}")


def _sequence(origin: type, arguments: tuple[object, ...], value: Setting, place: _Place) -> Setting:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value.strip() else []
    if not isinstance(value, list | tuple):
        raise place.wrong(value, "a list")
    item = arguments[0]
    return origin(_convert(item, part, place.at(str(index))) for index, part in enumerate(value))


def _mapping(item: object, value: Setting, place: _Place) -> Setting:
    if not isinstance(value, Mapping):
        raise place.wrong(value, "a mapping")
    return {str(key): _convert(item, part, place.at(str(key))) for key, part in value.items()}


def _text(value: Setting, place: _Place) -> str:
    if isinstance(value, str):
        return value
    raise place.wrong(value, "text")


def _integer(value: Setting, place: _Place) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    raise place.wrong(value, "a whole number")


def _float(value: Setting, place: _Place) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    raise place.wrong(value, "a number")


def _flag(value: Setting, place: _Place) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise place.wrong(value, "true or false")


def _secret(value: Setting, place: _Place) -> Secret:
    if isinstance(value, Secret):
        return value
    if isinstance(value, str):
        return Secret(value)
    # Not place.wrong: it would show the value.
    raise ConfigError(f"{place}: expected text (put it in quotes)")


def _path(value: Setting, place: _Place) -> Path:
    if isinstance(value, str | Path) and str(value):
        return Path(value)
    raise place.wrong(value, "a path")


def _anything(value: Setting, place: _Place) -> Setting:
    return value


_SCALARS: dict[type, Callable[[Setting, _Place], Setting]] = {
    str: _text,
    int: _integer,
    float: _float,
    bool: _flag,
    Secret: _secret,
    Path: _path,
    object: _anything,
}


def _name(hint: object) -> str:
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
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
    """YAML's safe loader that also refuses a repeated key."""
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
