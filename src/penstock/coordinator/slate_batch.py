"""The SlateDB binding, loaded on first use, and fast batches for it.

The generated binding copies bytes into the library one by one in Python, at 5 MB/s. A memmove reaches 300
MB/s and more, so the two copying functions are replaced when the module is loaded.

The binding takes about 15 us for each operation of a batch, mostly to create buffers in Python. `SlateBatch`
calls the library's functions directly: one copies bytes into a buffer, one adds the operation. Small
operations keep the interpreter lock, because releasing it takes longer than the operation, and another thread
may delay its return.

These functions are not public. If a release declares them differently, batches are filled through the
binding's public methods, which gives the same result more slowly.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from penstock.coordinator.storage import KEY_BYTES_MAX, Delete, Merge, Operation, Put
from penstock.errors import InvalidInput, Unsupported

_STRING_LENGTH = struct.Struct(">i")
_GENERATED = "slatedb.uniffi._slatedb_uniffi.slatedb"


@cache
def slatedb() -> ModuleType:
    """Return the generated module. Raises `Unsupported` if the package is not installed."""
    try:
        generated = import_module(_GENERATED)
    except ImportError as error:
        raise Unsupported(f"SlateDB cannot be loaded ({error}): pip install 'penstock[databases]'") from error
    _quicken(generated)
    return generated


def _quicken(generated: ModuleType) -> None:
    """Replace the copying functions if this release of the binding has them."""
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
        rust_buffer = buffer.alloc(_STRING_LENGTH.size + size)
        _copy(rust_buffer, 0, _STRING_LENGTH.pack(size), _STRING_LENGTH.size)
        _copy(rust_buffer, _STRING_LENGTH.size, bytes(value), size)
        rust_buffer.len = _STRING_LENGTH.size + size
        return rust_buffer

    builder.write = write
    converter.lower = staticmethod(lower)


def _copy(rust_buffer: Any, offset: int, data: bytes, size: int) -> None:
    if size:
        ctypes.memmove(ctypes.addressof(rust_buffer.data.contents) + offset, data, size)


_LOG = logging.getLogger(__name__)
_LENGTH: Final = struct.Struct(">i")
_LARGE: Final = 65_536
"""Size from which a copy takes long enough to justify releasing the lock."""
_CLONE: Final = "uniffi_slatedb_uniffi_fn_clone_writebatch"
_BUFFER: Final = "ffi_slatedb_uniffi_rustbuffer_from_bytes"
_METHOD: Final = "uniffi_slatedb_uniffi_fn_method_writebatch_"
_OPERATIONS: Final = ("put", "merge", "put_with_options", "merge_with_options", "delete")
_KINDS: Final = {"put": "PutOptions", "merge": "MergeOptions"}


class SlateBatch:
    """Ordered operations to be written with one `Db.write(handle)`. Not thread-safe."""

    def __init__(self) -> None:
        self.handle: Any = slatedb().WriteBatch()
        self.count = 0
        """Number of operations."""
        self._filler = _QuickFiller(self.handle) if is_quick() else _PlainFiller(self.handle)

    def add(self, operation: Operation) -> None:
        """Add an operation. Raises `InvalidInput` for a key that is empty or too long."""
        key = operation.key
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise InvalidInput(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")
        self._filler.add(operation)
        self.count += 1


class _PlainFiller:
    """Filler that uses the binding's public methods."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def add(self, operation: Operation) -> None:
        if isinstance(operation, Delete):
            self._handle.delete(operation.key)
            return
        name, value = _named(operation)
        if operation.expire_at_ms is None:
            getattr(self._handle, name)(operation.key, value)
        else:
            options = _made_options(name, operation.expire_at_ms)
            getattr(self._handle, f"{name}_with_options")(operation.key, value, options)


class _QuickFiller:
    """Filler that calls the library's functions directly."""

    def __init__(self, handle: Any) -> None:
        self._number: int = handle._handle
        self._status = slatedb()._UniffiRustCallStatus.default()
        self._status_at = ctypes.byref(self._status)
        self._short, self._long = _library(), _library(releases_lock=True)

    def add(self, operation: Operation) -> None:
        key = operation.key
        if isinstance(operation, Delete):
            self._call(self._short, "delete", _lowered(key))
            return
        name, value = _named(operation)
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

    def _fail(self) -> None:
        """Raise the error of the last call."""
        generated = slatedb()
        generated._uniffi_check_call_status(generated._UniffiFfiConverterTypeError, self._status)


def _named(operation: Put | Merge) -> tuple[str, bytes]:
    """Return the binding's name for the operation, and its value."""
    return ("put", operation.value) if isinstance(operation, Put) else ("merge", operation.operand)


class _Foreign(ctypes.Structure):
    """Bytes in the layout that the library takes."""

    _fields_ = (("len", ctypes.c_int32), ("data", ctypes.c_char_p))


@dataclass(frozen=True, slots=True)
class _Library:
    """The functions that fill a batch."""

    clone: Callable[..., int]
    buffer: Callable[..., object]
    add: dict[str, Callable[..., None]]


@cache
def _library(*, releases_lock: bool = False) -> _Library:
    """Return the library with the signatures that the binding declares."""
    generated = slatedb()
    declared = generated._UniffiLib
    library = (ctypes.CDLL if releases_lock else ctypes.PyDLL)(declared._name)

    def function(name: str, *argument_types: Any) -> Any:
        there, made = getattr(declared, name), library[name]
        made.argtypes, made.restype = argument_types or there.argtypes, there.restype
        return made

    status = ctypes.POINTER(generated._UniffiRustCallStatus)
    return _Library(
        clone=function(_CLONE),
        buffer=function(_BUFFER, _Foreign, status),
        add={name: function(_METHOD + name) for name in _OPERATIONS},
    )


@cache
def is_quick() -> bool:
    """Return whether the library's functions have exactly the signatures that this module uses."""
    generated = slatedb()
    try:
        as_used = _declared(generated) == _used(generated)
        as_used = as_used and isinstance(generated.WriteBatch()._handle, int)
        _ = generated._uniffi_check_call_status, generated._UniffiFfiConverterTypeError
        _ = _options("put", 0), _options("merge", 0), _library(), _library(releases_lock=True)
    except (AttributeError, TypeError) as error:
        _LOG.warning("SlateDB's binding has changed: %s. Batches are filled more slowly", error)
        return False
    if not as_used:
        _LOG.warning("SlateDB's binding has changed. Batches are filled more slowly")
    return as_used


def _declared(generated: ModuleType) -> list[object]:
    """Return the declared signatures of the functions and the layout of their structures."""
    names = (_CLONE, _BUFFER, *(_METHOD + name for name in _OPERATIONS))
    functions = [getattr(generated._UniffiLib, name) for name in names]
    signatures: list[object] = [(tuple(one.argtypes), one.restype) for one in functions]
    foreign, status = generated._UniffiForeignBytes, generated._UniffiRustCallStatus
    return [*signatures, [name for name, _ in foreign._fields_], ctypes.sizeof(foreign), status.code.size]


def _used(generated: ModuleType) -> list[object]:
    """Return the signatures and layout that this module uses."""
    number, buffer = ctypes.c_uint64, generated._UniffiRustBuffer
    status = ctypes.POINTER(generated._UniffiRustCallStatus)
    taken = {"put": 2, "merge": 2, "put_with_options": 3, "merge_with_options": 3, "delete": 1}
    return [
        ((number, status), number),
        ((generated._UniffiForeignBytes, status), buffer),
        *(((number, *[buffer] * taken[name], status), None) for name in _OPERATIONS),
        [name for name, _ in _Foreign._fields_],
        ctypes.sizeof(_Foreign),
        1,
    ]


def _lowered(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


@lru_cache(maxsize=1024)
def _options(name: str, expire_at_ms: int) -> bytes:
    """Return the encoded options of an operation that expires."""
    lowered = getattr(slatedb(), f"_UniffiFfiConverterType{_KINDS[name]}").lower(
        _made_options(name, expire_at_ms)
    )
    try:
        return ctypes.string_at(lowered.data, lowered.len)
    finally:
        lowered.free()


def _made_options(name: str, expire_at_ms: int) -> Any:
    generated = slatedb()
    return getattr(generated, _KINDS[name])(ttl=generated.Ttl.EXPIRE_AT_MILLIS(expire_at_ms))
