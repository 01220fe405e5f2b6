"""The time slice of the event loop's thread: a hint that may be refused and that is not inherited."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from penstock.servers import scheduling
from penstock.servers.scheduling import shorten_slice

T = TypeVar("T")

pytestmark = pytest.mark.timeout(20)
on_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="a feature of Linux"
)


def on_a_thread(work: Callable[[], T]) -> T:
    """Return the result of `work` on its own thread, so that the test's thread is not changed."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def slice_ns() -> int:
    _, get_attributes = scheduling._CALLS[platform.machine()]
    return scheduling._attributes(get_attributes)[5]


@on_linux
def test_threads_started_by_a_thread_with_a_short_slice_have_normal_slices() -> None:
    before = on_a_thread(slice_ns)

    def work() -> tuple[bool, int, int]:
        return shorten_slice(), slice_ns(), on_a_thread(slice_ns)

    agreed, own, started = on_a_thread(work)
    assert agreed == (own == 100_000)
    assert own in (before, 100_000)
    assert started == before


@on_linux
def test_niceness_and_policy_do_not_change() -> None:
    def work() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        shorten_slice()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)

    niceness, policy = on_a_thread(work)
    assert niceness == 3
    assert policy & ~os.SCHED_RESET_ON_FORK == os.SCHED_OTHER


@on_linux
def test_a_thread_with_its_own_policy_is_not_changed() -> None:
    def work() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return shorten_slice(), os.sched_getscheduler(0)

    assert on_a_thread(work) == (False, os.SCHED_BATCH)


@on_linux
def test_a_kernel_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    no_such_call = 100_000
    monkeypatch.setattr(scheduling, "_CALLS", {platform.machine(): (no_such_call, no_such_call)})
    assert not on_a_thread(shorten_slice)


@on_linux
def test_a_kernel_that_keeps_the_old_slice_is_reported_as_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 6.12 the call succeeds and reports a slice of 0."""
    monkeypatch.setattr(scheduling, "_attributes", lambda _: (48, 0, 0, 0, 0, 0, 0, 0))
    assert not on_a_thread(shorten_slice)


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "s390x")])
def test_other_systems_get_no_system_call(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert not shorten_slice()
