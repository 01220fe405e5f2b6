"""The local store under real processes: contended, forked and killed."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

from tests.process.torture import KEY, decode

import penstock
from penstock.clock import SYSTEM_CLOCK
from penstock.objects.directory import ObjectDirectory
from penstock.storage.fs import OsFileSystem

HERE = Path(__file__).parent
SOURCES = [str(Path(penstock.__file__).parent.parent), str(HERE.parent.parent)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
KILL_SECONDS = 4.0


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_four_processes_of_four_threads_lose_no_update(tmp_path: Path) -> None:
    store = ObjectDirectory(str(tmp_path), fs=OsFileSystem(), clock=SYSTEM_CLOCK)
    store.put_if_absent("counter", b"0")
    command = [sys.executable, str(HERE / "counter.py"), str(tmp_path), "4", "20"]
    processes = [subprocess.Popen(command, env=ENVIRONMENT) for _ in range(4)]
    assert [process.wait(timeout=90) for process in processes] == [0, 0, 0, 0]
    assert bytes(store.get("counter").data) == str(4 * 4 * 20).encode()


def test_no_acknowledged_write_is_lost_or_doubled_by_kill_9(tmp_path: Path) -> None:
    root, journal, seed = tmp_path / "store", tmp_path / "journal", 20
    done = subprocess.run(
        [sys.executable, str(HERE / "torture.py"), str(root), str(journal), str(seed), str(KILL_SECONDS)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    store = ObjectDirectory(str(root), fs=OsFileSystem(), clock=SYSTEM_CLOCK)
    tokens = decode(bytes(store.get(KEY).data))
    acked = journal.read_text().split()
    assert int(done.stdout) > 20, "enough kills to mean something"
    assert len(acked) > 50, "enough writes to mean something"
    assert [token for token, count in collections.Counter(tokens).items() if count > 1] == []
    assert set(acked) <= set(tokens)
    for writer in {token.split("-")[0] for token in tokens}:
        numbers = [int(token.split("-")[1]) for token in tokens if token.split("-")[0] == writer]
        assert numbers == list(range(len(numbers))), f"{writer} kept its order"
    # The next write works at once: the kernel dropped the locks of the dead.
    version = store.get(KEY).version
    assert version is not None
    assert store.put_if_match(KEY, b"", version)


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    code = """
import os, sys
from penstock.storage.fs import LockHeld, OsFileSystem
fs, path = OsFileSystem(), sys.argv[1]
with fs.lock(path):
    to_child, from_parent = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(from_parent)
        os.read(to_child, 1)
        os._exit(0)
    try:
        with fs.lock(path, wait=False):
            raise AssertionError("the parent's lock is gone")
    except LockHeld:
        pass
# The child lives and inherited the handle, yet the lock is free.
with fs.lock(path, wait=False):
    pass
os.close(from_parent)
assert os.waitpid(pid, 0)[1] == 0
"""
    run(code, str(tmp_path / "lock"))


def test_a_forked_child_that_leaves_the_block_does_not_free_its_parents_lock(tmp_path: Path) -> None:
    code = """
import os, sys
from penstock.storage.fs import LockHeld, OsFileSystem
fs, path = OsFileSystem(), sys.argv[1]
lock = fs.lock(path)
lock.__enter__()
pid = os.fork()
if pid == 0:
    lock.__exit__(None, None, None)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
try:
    with fs.lock(path, wait=False):
        raise AssertionError("the child freed it")
except LockHeld:
    pass
"""
    run(code, str(tmp_path / "lock"))


def test_a_forked_child_goes_on_using_the_local_store(tmp_path: Path) -> None:
    code = """
import asyncio, os, sys
from penstock.objects import LocalStore
store = LocalStore(sys.argv[1])
asyncio.run(store.put("k", b"parent"))
pid = os.fork()
if pid == 0:
    asyncio.run(store.put("child", bytes((asyncio.run(store.get("k"))).data)))
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert bytes(asyncio.run(store.get("child")).data) == b"parent"
"""
    run(code, str(tmp_path / "store"))


def test_a_remote_store_in_a_child_of_a_user_says_why_it_cannot_work() -> None:
    code = """
import asyncio, os, sys
from penstock.errors import PenstockError, Unavailable
from penstock.objects import StoreConfig, open_store
options = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1",
           "endpoint": "http://127.0.0.1:9", "allow_http": "true"}
store = open_store(StoreConfig(url="s3://bucket", options=options, retries=0))
def ask():
    try:
        asyncio.run(store.get("k"))
    except PenstockError as error:
        return error
def forked(expected):
    pid = os.fork()
    if pid == 0:
        error = ask()
        os._exit(0 if type(error) is Unavailable and ("forked" in str(error)) is expected else 1)
    assert os.waitpid(pid, 0)[1] == 0
forked(False)
assert "nothing listens" in str(ask())
forked(True)
"""
    run(code)


def test_a_data_directory_belongs_to_one_process(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
from penstock.storage import DirectoryLock, LockHeld, OsFileSystem
try:
    with DirectoryLock(OsFileSystem(), sys.argv[1]):
        if len(sys.argv) > 2:
            sys.exit(0)
        code = open("/proc/self/cmdline").read().split("\\0")[2]
        command = [sys.executable, "-c", code, sys.argv[1], "inner"]
        inner = subprocess.run(command, capture_output=True, text=True)
        assert inner.returncode == 3, inner.stderr
        assert f"process {os.getpid()} (" in inner.stdout, inner.stdout
    with DirectoryLock(OsFileSystem(), sys.argv[1]):
        pass
except LockHeld as error:
    print(error)
    sys.exit(3)
"""
    run(code, str(tmp_path / "data"))
