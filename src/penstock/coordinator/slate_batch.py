"""A batch for SlateDB, filled quickly.

The generated binding takes some 15 us for each operation, most of it to make buffers of bytes in Python. Here
the library's own functions are called: one copies bytes into a buffer, one adds the operation. Small
operations keep the interpreter's lock, because giving it up takes longer than they do, and getting it back
may take as long as another thread works.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

from penstock.coordinator.slate_binding import slatedb
from penstock.coordinator.storage import KEY_BYTES_MAX, Delete, Operation, Put
from penstock.errors import InvalidInput

__all__ = ["SlateBatch"]

_LENGTH: Final = struct.Struct(">i")
_LARGE: Final = 65_536
"""Bytes that take long enough to copy to let other threads work meanwhile."""
_OPERATIONS: Final = ("put", "merge", "put_with_options", "merge_with_options", "delete")


class SlateBatch:
    """Operations in order, for one `Db.write` of `handle`. For one thread at a time."""

    def __init__(self) -> None:
        generated = slatedb()
        self.handle: Any = generated.WriteBatch()
        self._number: int = self.handle._handle
        self._status = generated._UniffiRustCallStatus.default()
        self._status_at = ctypes.byref(self._status)
        self._short, self._long = _library(), _library(releases_lock=True)
        self.count = 0
        """Operations taken."""

    def add(self, operation: Operation) -> None:
        """Take one more operation. Raises `InvalidInput` for a key that is empty or too long."""
        key = operation.key
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise InvalidInput(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")
        if isinstance(operation, Delete):
            self._call(self._short, "delete", _lowered(key))
            return
        name, value = ("put", operation.value) if isinstance(operation, Put) else ("merge", operation.operand)
        library = self._short if len(value) < _LARGE else self._long
        if operation.expire_at_ms is None:
            self._call(library, name, _lowered(key), _lowered(value))
        else:
            options = _options(name, operation.expire_at_ms)
            self._call(library, f"{name}_with_options", _lowered(key), _lowered(value), options)

    def _call(self, library: _Library, name: str, *arguments: bytes) -> None:
        status_at = self._status_at
        buffers = [library.buffer(_Foreign(len(data), data), status_at) for data in arguments]
        library.add[name](library.clone(self._number, status_at), *buffers, status_at)
        if self._status.code:
            self._fail()
        self.count += 1

    def _fail(self) -> None:
        """Raise what the last call left behind."""
        generated = slatedb()
        generated._uniffi_check_call_status(generated._UniffiFfiConverterTypeError, self._status)


class _Foreign(ctypes.Structure):
    """Bytes of ours, as the library takes them."""

    _fields_ = (("len", ctypes.c_int32), ("data", ctypes.c_char_p))


@dataclass(frozen=True, slots=True)
class _Library:
    """The functions that fill a batch."""

    clone: Callable[..., int]
    buffer: Callable[..., object]
    add: dict[str, Callable[..., None]]


@cache
def _library(*, releases_lock: bool = False) -> _Library:
    """The library with the signatures that the binding has declared for it."""
    generated = slatedb()
    declared = generated._UniffiLib
    library = (ctypes.CDLL if releases_lock else ctypes.PyDLL)(declared._name)

    def function(name: str, *argument_types: Any) -> Any:
        there, made = getattr(declared, name), library[name]
        made.argtypes, made.restype = argument_types or there.argtypes, there.restype
        return made

    status = ctypes.POINTER(generated._UniffiRustCallStatus)
    prefix = "uniffi_slatedb_uniffi_fn"
    return _Library(
        clone=function(f"{prefix}_clone_writebatch"),
        buffer=function("ffi_slatedb_uniffi_rustbuffer_from_bytes", _Foreign, status),
        add={name: function(f"{prefix}_method_writebatch_{name}") for name in _OPERATIONS},
    )


def _lowered(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


@lru_cache(maxsize=1024)
def _options(name: str, expire_at_ms: int) -> bytes:
    """The options of an operation that expires, as the library reads them."""
    generated = slatedb()
    kind = "PutOptions" if name == "put" else "MergeOptions"
    made = getattr(generated, kind)(ttl=generated.Ttl.EXPIRE_AT_MILLIS(expire_at_ms))
    lowered = getattr(generated, f"_UniffiFfiConverterType{kind}").lower(made)
    try:
        return ctypes.string_at(lowered.data, lowered.len)
    finally:
        lowered.free()
