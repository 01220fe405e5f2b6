"""The SlateDB binding, loaded when it is first needed and made quick.

The generated code moves bytes into the library one by one in Python, at 5 MB/s. One memmove does the same at
300 MB/s and more, so the two places that copy are replaced when the module is loaded.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from penstock.errors import Unsupported

__all__ = ["slatedb"]

_LENGTH = struct.Struct(">i")
_GENERATED = "slatedb.uniffi._slatedb_uniffi.slatedb"


@cache
def slatedb() -> ModuleType:
    """The generated module. Raises `Unsupported` if the package is not installed."""
    try:
        generated = import_module(_GENERATED)
    except ImportError as error:
        raise Unsupported(f"SlateDB cannot be loaded ({error}): pip install 'penstock[databases]'") from error
    _quicken(generated)
    return generated


def _quicken(generated: ModuleType) -> None:
    """Replace the copies, where the binding still has them; a later release may do without."""
    builder = getattr(generated, "_UniffiRustBufferBuilder", None)
    converter = getattr(generated, "_UniffiFfiConverterBytes", None)
    buffer = getattr(generated, "_UniffiRustBuffer", None)
    if builder is None or converter is None or buffer is None or not hasattr(builder, "_reserve"):
        return

    def write(self: Any, value: bytes) -> None:
        size = len(value)
        with self._reserve(size):
            _copy(self.rbuf, self.rbuf.len, bytes(value), size)

    def lower(value: bytes) -> Any:
        size = len(value)
        rust_buffer = buffer.alloc(_LENGTH.size + size)
        _copy(rust_buffer, 0, _LENGTH.pack(size), _LENGTH.size)
        _copy(rust_buffer, _LENGTH.size, bytes(value), size)
        rust_buffer.len = _LENGTH.size + size
        return rust_buffer

    builder.write = write
    converter.lower = staticmethod(lower)


def _copy(rust_buffer: Any, offset: int, data: bytes, size: int) -> None:
    if size:
        ctypes.memmove(ctypes.addressof(rust_buffer.data.contents) + offset, data, size)
