"""What users depend on by name: Python names, commands, exit codes, settings, metrics, Spark, the wire.

    python -m tests.unit.compatibility.surface [MODULE:NAME ...]

writes `tests/golden/surface` again, with these names of Python in addition. Do that only for an addition, or
for a removal that the changelog announces: `test_surface` fails indefinitelyy other difference. The interface
of a package may have more names, for other packages; users are promised those that `python.json` lists.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

import penstock
from penstock.blocking import BlockingContext, BlockingProxy
from penstock.cli.failure import ExitCode
from penstock.cli.main import cli

GOLDEN: Final = Path(__file__).parents[2] / "golden" / "surface"
SOURCE: Final = Path(penstock.__file__).parent

PACKAGES: Final = (
    "penstock.buffer",
    "penstock.buffer.inspect",
    "penstock.buffer.sharded",
    "penstock.buffer.sync",
    "penstock.clock",
    "penstock.collector",
    "penstock.config",
    "penstock.coordinator",
    "penstock.coordinator.keys",
    "penstock.coordinator.slate",
    "penstock.coordinator.sync",
    "penstock.coordinator.values",
    "penstock.errors",
    "penstock.limits",
    "penstock.metrics",
    "penstock.objects",
    "penstock.otlp",
    "penstock.quiver",
    "penstock.services",
    "penstock.services.timeseries_feed",
    "penstock.services.vector_feed",
    "penstock.spark",
    "penstock.testing",
    "penstock.timeseries",
    "penstock.timeseries.promql",
    "penstock.timeseries.sync",
    "penstock.topics",
    "penstock.topics.client",
    "penstock.topics.client.sync",
    "penstock.units",
    "penstock.vector",
    "penstock.vector.records",
    "penstock.vector.sync",
)
"""The modules that docs/reference/api.md and docs/how-to name; everything else is internal."""


_PROXIES: Final = (BlockingProxy, BlockingContext)
"""The bases of the blocking classes, which bring their `__init__`."""

Surface = dict[str, object]


def promised_names(module: str) -> list[str]:
    """The names of `module` that users are promised, in order."""
    found = json.loads((GOLDEN / "python.json").read_text(encoding="utf-8"))[module]
    return sorted(found)


def python_names(added: Mapping[str, Sequence[str]] = types.MappingProxyType({})) -> Surface:
    """Each public module, its promised names, and of each name what a caller can write."""
    return {
        module: _module(importlib.import_module(module), {*promised_names(module), *added.get(module, ())})
        for module in PACKAGES
    }


def _module(module: types.ModuleType, names: Collection[str]) -> Surface:
    return {name: _described(getattr(module, name)) for name in sorted(names) if name in module.__all__}


def _described(value: object) -> object:
    if isinstance(value, type):
        return _class(value)
    if callable(value) and not isinstance(value, types.GenericAlias):
        return _parameters(value)
    return "value"


def _class(cls: type) -> Surface:
    if issubclass(cls, enum.Enum):
        return {"values": {name: _plain(member.value) for name, member in cls.__members__.items()}}
    found: Surface = {}
    if issubclass(cls, BaseException):
        kinds = [base.__name__ for base in cls.__mro__[1:] if base.__module__.startswith("penstock")]
        found["is"] = sorted(set(kinds))
    if dataclasses.is_dataclass(cls):
        found["fields"] = {field.name: _default(field) for field in dataclasses.fields(cls) if field.init}
    elif any("__init__" in vars(base) for base in cls.__mro__ if base is cls or base in _PROXIES):
        found["call"] = _parameters(cls)
    members: Surface = {}
    for name in dir(cls):
        if name.startswith("_") or (
            dataclasses.is_dataclass(cls) and name in typing.cast(Surface, found["fields"])
        ):
            continue
        owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
        if owner.__module__.startswith("penstock"):
            member = inspect.getattr_static(cls, name)
            inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            members[name] = _parameters(inner) if inspect.isfunction(inner) else "attribute"
    return found | ({"members": members} if members else {})


def _parameters(call: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:
        return "()"
    shown: list[str] = []
    for one in parameters:
        if one.name in ("self", "cls") or one.name.startswith("_"):
            continue
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        place = {one.KEYWORD_ONLY: "keyword ", one.POSITIONAL_ONLY: "positional "}.get(one.kind, "")
        optional = "" if one.default is one.empty else "="
        shown.append(f"{place}{star}{one.name}{optional}")
    return f"({', '.join(shown)})"


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default is not dataclasses.MISSING:
        return _plain(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else "made"


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


def commands() -> Surface:
    """Every command with its arguments and options."""
    return dict(_walk(cli, click.Context(cli), ("penstock",)))


def _walk(
    command: click.Command, context: click.Context, path: tuple[str, ...]
) -> Iterator[tuple[str, Surface]]:
    yield " ".join(path), {_spelled(option): _kind(option) for option in command.params}
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            child = command.get_command(context, name)
            assert child is not None
            yield from _walk(child, click.Context(child, parent=context), (*path, name))


def _spelled(option: click.Parameter) -> str:
    if isinstance(option, click.Option):
        return ", ".join(sorted([*option.opts, *option.secondary_opts]))
    return str(option.name)


def _kind(option: click.Parameter) -> str:
    words = ["flag" if isinstance(option, click.Option) and option.is_flag else option.type.name]
    if isinstance(option.type, click.Choice):
        words[0] = "|".join(sorted(str(getattr(choice, "value", choice)) for choice in option.type.choices))
    words += [word for word in ("required", "multiple") if getattr(option, word)]
    if isinstance(option, click.Option) and option.envvar:
        words.append(f"or {option.envvar}")
    return ", ".join(words)


def exit_codes() -> Surface:
    return {code.name: code.value for code in ExitCode}


def metrics() -> Surface:
    """Every metric that the source registers by a literal name, with its labels.

    `{…}` stands for what is known only at run time.
    """
    found: dict[str, object] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            kind = ast.unparse(node.func).rpartition(".")[2]
            if kind in ("counter", "gauge", "histogram") and (name := _text(node.args[0])):
                given = [
                    *node.args[2:3],
                    *(word.value for word in node.keywords if word.arg == "label_names"),
                ]
                labels = sorted(_texts(given[0])) if given else []
                found[name] = f"{kind}({', '.join(labels)})"
    return dict(sorted(found.items()))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values]
        return "".join(str(part) for part in parts)
    return ""


def _texts(node: ast.expr) -> list[str]:
    return [str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)]


def configuration() -> Surface:
    """Keys of every file and of every environment, with their defaults."""
    from penstock.buffer import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
    from penstock.collector import settings as collector
    from penstock.collector.config import PersistenceSettings, TelemetrySettings
    from penstock.objects import StoreConfig
    from penstock.quiver import QuiverConfig
    from penstock.spark.pipeline.spec import PipelineSpec
    from penstock.up.settings import UpSettings

    sections: Mapping[str, type] = {
        "buffer producer": ProducerConfig,
        "buffer consumer": ConsumerConfig,
        "buffer collector of garbage": GarbageCollectorConfig,
        "store": StoreConfig,
        "quiver": QuiverConfig,
        "up": UpSettings,
        "pipeline": PipelineSpec,
        "collector receiver otlp": collector.OtlpReceiverSettings,
        "collector receiver otap": collector.OtapReceiverSettings,
        "collector exporter otlp": collector.OtlpExporterSettings,
        "collector exporter otap": collector.OtapExporterSettings,
        "collector exporter buffer": collector.BufferSettings,
        "collector exporter file": collector.FileSettings,
        "collector exporter parquet": collector.ParquetSettings,
        "collector exporter debug": collector.DebugSettings,
        "collector exporter noop": collector.NoopSettings,
        "collector exporter flaky": collector.FlakySettings,
        "collector processor persistence": PersistenceSettings,
        "collector telemetry": TelemetrySettings,
    }
    return {name: dict(_keys(cls)) for name, cls in sections.items()} | {"topics server": _environment()}


def _keys(cls: type, prefix: str = "", above: tuple[type, ...] = ()) -> Iterator[tuple[str, object]]:
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init or field.name.startswith("_"):
            continue
        name = f"{prefix}{field.name}"
        inner = [
            part for part in _parts(hints[field.name]) if dataclasses.is_dataclass(part) and part not in above
        ]
        yield name, _default(field)
        for part in inner:
            assert isinstance(part, type)
            yield from _keys(part, f"{name}.", (*above, cls))


def _hints(cls: type) -> dict[str, object]:
    """The types of the fields; a name that only type checkers import stays unknown."""
    names: dict[str, object] = {}
    while True:
        try:
            return typing.get_type_hints(cls, localns=names)
        except NameError as error:
            names[str(error.name)] = object


def _parts(hint: object) -> Iterator[object]:
    yield hint
    for part in typing.get_args(hint):
        yield from _parts(part)


class _Asked(dict[str, str]):
    """An environment that is empty and remembers which variables were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return default

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return False


def _environment() -> Surface:
    from penstock.servers.settings import ServerSettings

    asked = _Asked()
    ServerSettings.from_env(asked)
    return dict.fromkeys(sorted(asked.names), "variable")


def environment_names() -> Surface:
    """Every environment variable of ours that the source names."""
    pattern = re.compile(r"(PENSTOCK|TOPICS|TIMESERIES|VECTOR)(_[A-Z]+)+(__)?")
    found = {
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value)
    }
    return dict.fromkeys(sorted(found - {"VECTOR_OPTIONS", "VECTOR_FORMAT", "VECTOR_FIELD"}), "variable")


def spark_formats() -> Surface:
    """The names that `spark.read.format` and `df.write.format` take."""
    import pyspark

    from penstock.spark import register

    class _Sources:
        def __init__(self) -> None:
            self.names: list[str] = []
            self.version = pyspark.__version__
            self.dataSource = self

        def register(self, source: Any) -> None:
            self.names.append(source.name())

    sources = _Sources()
    register(typing.cast(Any, sources))
    return dict.fromkeys(sorted(sources.names), "format")


def wire() -> Surface:
    """Every route with its methods and scopes, every error code of `/v0`, and every name of an event."""
    trees = {
        path.relative_to(SOURCE): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }
    shared: dict[str, list[bytes]] = {}
    for tree in trees.values():
        named = _values(tree, {})
        shared |= {name: values for name, values in named.items() if name.isupper() and name[0] != "_"}
    found: dict[str, dict[str, str]] = {}
    for path, tree in trees.items():
        server = "/".join(path.parts[: 2 if path.parts[0] == "servers" else 1])
        for route, scope in _routes(tree, shared):
            found.setdefault(server, {})[route] = scope
    events = {name for tree in trees.values() for name in _event_names(tree)}
    codes = {
        child.value.value
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, ast.Assign | ast.AnnAssign)
        and _target(child) == "code"
        and isinstance(child.value, ast.Constant)
        and isinstance(child.value.value, str)
        and child.value.value
    }
    return {
        "routes": found,
        "error codes": dict.fromkeys(sorted(codes), "code"),
        "events": dict.fromkeys(sorted(events), "event"),
    }


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _routes(tree: ast.Module, shared: Mapping[str, Sequence[bytes]]) -> Iterator[tuple[str, str]]:
    """Each `method, path, Route(...)` of a module, with the scope of the route."""
    known = _values(tree, shared)
    scopes = {
        node.targets[0].id: ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for method, path, route in _route_rows(tree, known):
        words = [ast.unparse(word.value) for word in route.keywords if word.arg == "scope"] or ["default"]
        yield f"{method.decode()} {path.decode()}", scopes.get(words[0], words[0])


def _route_rows(node: ast.AST, known: Mapping[str, list[bytes]]) -> Iterator[tuple[bytes, bytes, ast.Call]]:
    """Rows of routes below `node`; inside a loop, its names have the values that it draws."""
    if isinstance(node, ast.For | ast.GeneratorExp | ast.ListComp):
        known = dict(known)
        for loop in [node] if isinstance(node, ast.For) else node.generators:
            _bind(loop.target, getattr(loop.iter, "elts", [loop.iter]), known)
    if isinstance(node, ast.Tuple) and len(node.elts) == 3 and isinstance(node.elts[2], ast.Call):
        method, path, route = node.elts
        if ast.unparse(route.func) == "Route":
            yield from ((one, place, route) for one in _bytes(method, known) for place in _bytes(path, known))
    for child in ast.iter_child_nodes(node):
        yield from _route_rows(child, known)


def _values(tree: ast.Module, shared: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
    """The values of each name of a module that is assigned bytes."""
    known = {name: list(values) for name, values in shared.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            _bind(node.targets[0], [node.value], known)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            _bind(node.target, [node.value], known)
    return known


def _bind(target: ast.expr, values: Sequence[ast.expr], known: dict[str, list[bytes]]) -> None:
    if isinstance(target, ast.Name):
        found = [one for value in values for one in _bytes(value, known)]
        if found:
            known[target.id] = found
    elif isinstance(target, ast.Tuple):
        for place, part in enumerate(target.elts):
            rows = [value.elts for value in values if isinstance(value, ast.Tuple)]
            _bind(part, [row[place] for row in rows if len(row) > place], known)


def _bytes(node: ast.expr, known: Mapping[str, Sequence[bytes]]) -> list[bytes]:
    """The values that an expression of constants and known names may have."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, bytes) else []
    if isinstance(node, ast.Name):
        return list(known.get(node.id, ()))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in _bytes(node.left, known) for b in _bytes(node.right, known)]
    if isinstance(node, ast.Tuple | ast.List):
        return [value for part in node.elts for value in _bytes(part, known)]
    return []


def _event_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "event" and node.args:
            yield from (name.decode() for name in _bytes(node.args[0], {}))


PARTS: Final[Mapping[str, Callable[[], Surface]]] = {
    "python": python_names,
    "commands": commands,
    "exit-codes": exit_codes,
    "metrics": metrics,
    "configuration": configuration,
    "environment": environment_names,
    "spark-formats": spark_formats,
    "wire": wire,
}


def write(additions: Sequence[str]) -> None:
    """Write the golden files, with `additions` (`module:name`) among the promised names."""
    added: dict[str, list[str]] = {}
    for addition in additions:
        module, _, name = addition.partition(":")
        added.setdefault(module, []).append(name)
    for part, collect in PARTS.items():
        found = python_names(added) if collect is python_names else collect()
        text = json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True)
        (GOLDEN / f"{part}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:])
