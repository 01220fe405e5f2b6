"""The page: every file below `static/`, read once, with a tag to tell whether a browser has it."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import os
from dataclasses import dataclass
from typing import Final

from penstock.http import Request, Response

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
_PACKED: Final = (".css", ".html", ".js", ".json", ".mjs", ".svg", ".txt", ".md")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    stamp: tuple[int, int]
    data: bytes
    packed: bytes | None
    kind: bytes
    tag: bytes


class StaticFiles:
    """Files by their path below a folder, and nothing outside of it. A file that changes is read again."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}

    def answer(self, request: Request, name: str) -> Response | None:
        """The file, or that the browser has it (304); None if there is no such file."""
        file = self._file(name)
        if file is None:
            return None
        headers = [(b"etag", file.tag), (b"cache-control", b"no-cache"), (b"vary", b"accept-encoding")]
        if file.tag in _tags(request.headers.get(b"if-none-match", b"")):
            return Response(304, content_type=file.kind, headers=headers)
        if file.packed is not None and b"gzip" in request.headers.get(b"accept-encoding", b""):
            headers.append((b"content-encoding", b"gzip"))
            return Response(200, file.packed, content_type=file.kind, headers=headers)
        return Response(200, file.data, content_type=file.kind, headers=headers)

    def _file(self, name: str) -> _File | None:
        parts = name.split("/")
        if not all(parts) or any(part.startswith(".") or "\\" in part or "\0" in part for part in parts):
            return None
        path = os.path.join(self._folder, *parts)
        try:
            found = os.stat(path)
            if not os.path.isfile(path):
                return None
            known = self._files.get(name)
            stamp = (found.st_mtime_ns, found.st_size)
            if known is None or known.stamp != stamp:
                known = self._files[name] = _read(path, stamp)
        except OSError:
            return None
        return known


def _read(path: str, stamp: tuple[int, int]) -> _File:
    with open(path, "rb") as file:
        data = file.read()
    ending = os.path.splitext(path)[1].lower()
    kind = _TYPES.get(ending) or mimetypes.guess_type(path)[0] or "application/octet-stream"
    packed = gzip.compress(data, 9, mtime=0) if ending in _PACKED else None
    tag = b'"%b"' % hashlib.sha256(data).hexdigest()[:32].encode()
    return _File(stamp=stamp, data=data, packed=packed, kind=kind.encode(), tag=tag)


def _tags(header: bytes) -> set[bytes]:
    return {tag.strip().removeprefix(b"W/") for tag in header.split(b",")}
