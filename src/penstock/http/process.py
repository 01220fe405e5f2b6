"""A server as a process: the quickest loop there is, signals as an event, settings of the whole process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Final

_SWITCH_INTERVAL_S: Final = 0.0005


def run(main: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> None:
    """Run `main` on the quickest loop there is; SIGINT and SIGTERM set the event it is given."""
    tune()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_with_signals(main))


async def _with_signals(main: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await main(stop)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def tune() -> None:
    """Process-wide settings that a server wants and a library must not touch."""
    # The commit thread comes back from its sync and needs the interpreter, which the loop holds.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Requests leave nothing behind for the cycle collector, so it need not look as often.
    gc.set_threshold(50_000, 20, 100)
    if sys.platform == "linux":
        _keep_large_buffers()


def settle() -> None:
    """Take what recovery built out of the cycle collector's sight: it stays, and there may be a lot of it."""
    gc.collect()
    gc.freeze()


def _keep_large_buffers() -> None:
    """Let glibc reuse the memory of large joins; otherwise each one faults its pages in anew."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mmap_threshold, trim_threshold, top_pad = -3, -1, -2
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 64 << 20)
