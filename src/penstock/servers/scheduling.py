"""Kernel scheduling of the event loop's thread next to busy threads.

If every core is busy, a thread that wakes waits until a running thread has used up its time slice. The
kernel may check that only at its next tick: after 4 ms at 250 Hz. A thread that requests shorter slices than
the others may preempt them when it wakes. Its share of CPU time stays the same, so no thread starves.
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
"""The shortest slice that Linux supports."""
_CALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
"""The numbers of `sched_setattr` and `sched_getattr`, which the C library does not wrap."""
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""Size, policy, flags, niceness, priority, runtime (the slice), deadline, period."""
_RESET_ON_FORK: Final = 0x01


def shorten_slice() -> bool:
    """Request that the calling thread runs soon after it wakes. Return whether the kernel accepted.

    Threads and processes that it starts later have normal slices. Linux 6.12 and later support this. Nothing
    changes on other systems, without the permission, or if the thread has its own policy or priority.
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
    if policy != os.SCHED_OTHER or niceness < 0:  # with the reset flag, new threads would not inherit it
        return False
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, flags | _RESET_ON_FORK, niceness, 0, _SLICE_NS, 0, 0)
    _call(set_attributes, ctypes.create_string_buffer(wanted, len(wanted)), 0)
    return bool(_attributes(get_attributes)[5] == _SLICE_NS)


def _attributes(get_attributes: int) -> tuple[int, ...]:
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    _call(get_attributes, buffer, _ATTRIBUTES.size, 0)
    return _ATTRIBUTES.unpack(buffer.raw)


def _call(number: int, buffer: ctypes.Array[ctypes.c_char], *arguments: int) -> None:
    """Run a system call on this thread. Raise `OSError` if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(number), 0, buffer, *arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
