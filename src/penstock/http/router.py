"""Routes by path and method."""

from __future__ import annotations

from typing import Final, Generic, TypeVar
from urllib.parse import unquote_to_bytes

import httptools

R = TypeVar("R")

_REMEMBERED_MAX: Final = 8192


class Match(Generic[R]):
    """The route of a path: its methods, and the decoded name if the path has one."""

    __slots__ = ("methods", "name")

    def __init__(self, methods: dict[bytes, R], name: str) -> None:
        self.methods = methods
        self.name = name

    @property
    def allowed(self) -> bytes:
        """The methods, formatted for the `Allow` header."""
        return b", ".join(sorted(self.methods))


class Router(Generic[R]):
    """Routes by path and method. A pattern may contain one `{name}` segment.

    A cached path costs one dictionary lookup; the cache is bounded.
    """

    def __init__(self) -> None:
        self._fixed: dict[bytes, dict[bytes, R]] = {}
        self._named: dict[tuple[int, int], dict[tuple[bytes, ...], dict[bytes, R]]] = {}
        self._seen: dict[bytes, Match[R] | None] = {}

    def add(self, method: bytes, pattern: bytes, route: R) -> None:
        parts = pattern.split(b"/")
        places = [place for place, part in enumerate(parts) if part.startswith(b"{")]
        if places:
            (place,) = places
            shapes = self._named.setdefault((len(parts), place), {})
            methods = shapes.setdefault((*parts[:place], *parts[place + 1 :]), {})
        else:
            methods = self._fixed.setdefault(pattern, {})
        assert method not in methods, f"two routes for {method!r} {pattern!r}"
        methods[method] = route

    def match(self, path: bytes) -> Match[R] | None:
        """Return the match of a path, or None if there is no route. Names are percent-decoded only here."""
        try:
            return self._seen[path]
        except KeyError:
            pass
        found = self._find(path)
        if len(self._seen) >= _REMEMBERED_MAX:
            self._seen.clear()
        if len(path) <= 1024:
            self._seen[path] = found
        return found

    def _find(self, path: bytes) -> Match[R] | None:
        if not path.startswith(b"/"):
            path = _path_of(path)
        methods = self._fixed.get(path)
        if methods is not None:
            return Match(methods, "")
        parts = path.split(b"/")
        for (count, place), shapes in self._named.items():
            if len(parts) != count or not parts[place]:
                continue
            methods = shapes.get((*parts[:place], *parts[place + 1 :]))
            if methods is not None:
                return Match(methods, unquote_to_bytes(parts[place]).decode("utf-8", "replace"))
        return None


def _path_of(target: bytes) -> bytes:
    """Return the path of a target in absolute form (`http://host/path`)."""
    try:
        return httptools.parse_url(target).path or b"/"
    except httptools.HttpParserInvalidURLError:
        return b""
