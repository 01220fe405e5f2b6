"""Scheduling of the event loop by the kernel, beside threads that compute.

Where every core is busy, a thread that wakes waits until the one that runs has used up its slice, which the
kernel may look at only with its next tick: 4 ms at 250 Hz. A thread that asks for shorter slices than the
others may interrupt them when it wakes. Its share of the processor stays the same: no thread starves.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import sys
from typing import Final

_LOG = logging.getLogger(__name__)
_SLICE_NS: Final = 100_000
"""The shortest that Linux knows."""
_CALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
"""The numbers of `sched_setattr` and `sched_getattr`, for which the C library has no names."""
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""Size, policy, flags, niceness, priority, runtime (the slice), deadline, period."""
_RESET_ON_FORK: Final = 0x01


def shorten_slice() -> bool:
    """Ask that the calling thread runs soon after it wakes, and return whether the kernel agreed.

    Threads and processes that it starts from now on have slices as always. Linux 6.12 and later can do this;
    elsewhere, where it is not permitted, and where the thread was given a policy or a priority of
    its own, nothing changes.
    """
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return False
    try:
        return _shorten(*calls)
    except (OSError, AttributeError) as error:
        _LOG.debug("the event loop keeps its slice: %s", error)
        return False


def _shorten(set_attributes: int, get_attributes: int) -> bool:
    _, policy, flags, niceness, *_ = _attributes(get_attributes)
    if policy != os.SCHED_OTHER or niceness < 0:  # what the thread starts would not inherit it any more
        return False
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, flags | _RESET_ON_FORK, niceness, 0, _SLICE_NS, 0, 0)
    _call(set_attributes, ctypes.create_string_buffer(wanted, len(wanted)), 0)
    return bool(_attributes(get_attributes)[5] == _SLICE_NS)


def _attributes(get_attributes: int) -> tuple[int, ...]:
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    _call(get_attributes, buffer, _ATTRIBUTES.size, 0)
    return _ATTRIBUTES.unpack(buffer.raw)


def _call(number: int, buffer: ctypes.Array[ctypes.c_char], *arguments: int) -> None:
    """A system call about this thread. Raises `OSError`."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(number), 0, buffer, *arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
