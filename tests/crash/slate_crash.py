"""A process that works on SlateDB and dies at one of its operations, and what it had told by then.

The operations are those of SlateDB's own handles: to open, to write a batch, to persist, to take a snapshot,
to read, to close. `Dying` stands below `SlateStorage`, so the databases above it are as users run them.

SlateDB's threads do not survive a fork. `Lives` therefore keeps one process that has loaded everything and
opened nothing, and forks a new one for each life: that takes milliseconds instead of seconds.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, Protocol

import penstock
from penstock.coordinator import Durability, SyncMode, WriteHandle, slate
from penstock.coordinator.slate_batch import slatedb

__all__ = ["WRITES", "Journal", "Life", "Lives", "Moment", "Sweep", "feed"]

ROOT: Final = Path(__file__).parents[2]
_LIFE_S: Final = 30
"""A life takes tenths of a second; one that stands still is ended by an alarm."""
_ATTEMPTS: Final = 3
"""What runs side by side does not do so in the same order each time, and a life may be one sync shorter."""
_LEFT_OUT: Final = ("PENSTOCK_", "PYTHON")
"""Settings of whoever runs the tests."""
_QUIET_TURNS: Final = 200
_PLAN: Final = (
    (SyncMode.EXPLICIT, ((1, Durability.DURABLE), (1, Durability.FLUSHED), (2, Durability.DURABLE))),
    (SyncMode.EVERY_FLUSH, ((1, Durability.FLUSHED), (1, Durability.FLUSHED), (2, None))),
    (SyncMode.EXPLICIT, ((1, Durability.FLUSHED), (1, Durability.FLUSHED), (2, None))),
)
"""How a database is opened each time; how many writes come then, and how far a flush takes them.

There are flushes that wait for a later sync, syncs beside the next flush, and writes that only the end makes
durable.
"""
WRITES: Final = sum(count for _, steps in _PLAN for count, _ in steps)


class Moment(StrEnum):
    """When a process dies, seen from one operation."""

    BEFORE = "before"
    """It is not begun."""
    HELD = "held"
    """It is not begun, and so many writes were acknowledged since, or nothing beside it goes on any more."""
    BEGUN = "begun"
    """It was begun some turns of the event loop ago, and has not returned, or just so."""
    TORN = "torn"
    """The kernel ends the process in the middle of a file that SlateDB writes."""
    STORED = "stored"
    """There are so many new files, and it has not returned, or just so."""
    AFTER = "after"
    """It has returned, and nobody has heard of it."""


_TURNS: Final = ((1, 3, 8, 21), (13, 34, 89))
"""Of the event loop; an operation takes some ten to some hundred. Each takes one of either row."""
_FILES: Final = {"open": (1, 2, 3, 4, 5, 6, 7), "flush_with_options": (1,), "shutdown": (1, 2, 3)}
"""How many new ones an operation may make."""
_BYTES: Final = {"open": (0, 1, 30, 100), "flush_with_options": (0, 100, 250), "shutdown": (0, 100, 1000)}
"""Files are of some ten to some thousand bytes: the first that is longer is cut there."""
_ACKS: Final = {
    **dict.fromkeys(("open", "write", "snapshot", "await_durable", "shutdown"), (WRITES,)),
    "flush_with_options": (1, 2, WRITES),
}
"""Of writes, while an operation is held. A later sync does what a held one was to do, so not all may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """The operation, counted from 1, and the moment; the number is of acks, turns, bytes or files."""

    operation: int
    moment: Moment
    number: int = 0


def strikes(operations: Sequence[str], moment: Moment) -> list[Strike]:
    """All points of a life with these operations at which it may die so."""
    return [
        Strike(operation=place, moment=moment, number=number)
        for place, name in enumerate(operations, 1)
        for number in _numbers(moment, name, place)
    ]


def _numbers(moment: Moment, name: str, place: int) -> Sequence[int]:
    """None for an operation that leaves no more behind at this moment than before it or after it."""
    match moment:
        case Moment.HELD:
            return _ACKS.get(name, ())
        case Moment.BEGUN:
            rows = _TURNS if name == "write" or name in _FILES else ()
            return [numbers[place % len(numbers)] for numbers in rows]
        case Moment.TORN:
            return _BYTES.get(name, ())
        case Moment.STORED:
            return _FILES.get(name, ())
        case _:
            return (0,)


@dataclass(slots=True, kw_only=True)
class Life:
    """What became of a process."""

    strike: Strike | None
    place: Path
    status: int
    """As `os.waitstatus_to_exitcode` tells it: 0, or minus the signal."""
    sent: list[int] = field(default_factory=list)
    """Entries that it began to write."""
    durable: dict[int, list[list[Any]]] = field(default_factory=dict)
    """Entries that it acknowledged, each with the ids that they were stored under."""
    operations: list[str] = field(default_factory=list)
    """What it did, up to its death."""
    died: bool = False
    """Whether its operation was reached."""
    failure: str = ""

    @property
    def last_durable(self) -> int:
        return max(self.durable, default=-1)

    @property
    def last_sent(self) -> int:
        return max(self.sent, default=-1)


class Journal:
    """What the process tells while it lives: a pipe holds it whatever becomes of the process."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.acks = 0

    def tell(self, **said: object) -> None:
        os.write(self._pipe, json.dumps(said).encode() + b"\n")

    def sent(self, number: int) -> None:
        """An entry is about to be written."""
        self.tell(sent=number)

    def durable(self, number: int, ids: list[list[Any]]) -> None:
        """An entry is durable."""
        self.tell(durable=number, ids=ids)
        self.acks += 1


class Fed(Protocol):
    """A database, as the lives of all of them need it."""

    @property
    def position(self) -> int | None:
        """The number of the last write that is stored."""
        ...

    async def write(self, number: int) -> WriteHandle:
        """Begin a write that is stored together with its number."""
        ...

    def ids(self, number: int) -> list[list[Any]]:
        """What the write is stored under, asked for when it is flushed."""
        ...

    async def flush(self, level: Durability) -> None: ...

    async def close(self) -> None: ...


async def feed(open: Callable[[SyncMode], Awaitable[Fed]], journal: Journal) -> None:
    """One life: a database is opened three times and fed with numbered writes, as from a queue."""
    for mode, steps in _PLAN:
        database = await open(mode)
        position = database.position
        coming = iter(range(0 if position is None else position + 1, WRITES))
        async with asyncio.TaskGroup() as noting:
            for count, level in steps:
                for number in islice(coming, count):
                    journal.sent(number)
                    handle = await database.write(number)
                    noting.create_task(_note(handle, number, database, journal))
                if level is not None:
                    await database.flush(level)
            await database.close()


async def _note(handle: WriteHandle, number: int, database: Fed, journal: Journal) -> None:
    """Tell of a write at the moment it is durable, with the ids that its flush has given out."""
    await handle.wait(Durability.FLUSHED)
    ids = database.ids(number)
    await handle.wait(Durability.DURABLE)
    journal.durable(number, ids)


class Dying:
    """Counts SlateDB's operations, and ends the process at one of them."""

    def __init__(self, strike: Strike | None, place: Path, journal: Journal) -> None:
        self._strike = strike
        self._place = place
        self._journal = journal
        self._under_way = 0
        self.operations: list[str] = []

    def watched(self, native: Any) -> Any:
        """A handle of SlateDB whose operations count."""
        return _Watched(native, self)

    async def run(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.operations.append(name)
        if self._strike is not None and len(self.operations) == self._strike.operation:
            await self._strike_now(self._strike, call)
        self._under_way += 1
        try:
            return await call()
        finally:
            self._under_way -= 1

    async def _strike_now(self, strike: Strike, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            await self._let_live(strike, call)
        finally:  # also if nobody waits for the operation any more
            self._journal.tell(died=self.operations)
            os.kill(os.getpid(), signal.SIGKILL)

    async def _let_live(self, strike: Strike, call: Callable[[], Awaitable[Any]]) -> None:
        """Return at the moment to die, or do not."""
        match strike.moment:
            case Moment.BEFORE:
                pass
            case Moment.HELD:
                await self._quiet(self._journal.acks + strike.number)
            case Moment.BEGUN:
                task = asyncio.ensure_future(call())
                for _ in range(strike.number):
                    if not task.done():
                        await asyncio.sleep(0)
            case Moment.TORN:
                self._journal.tell(died=self.operations)
                resource.setrlimit(resource.RLIMIT_FSIZE, (strike.number, resource.RLIM_INFINITY))
                await call()
            case Moment.STORED:
                there, task = self._files(), asyncio.ensure_future(call())
                await self._until(lambda: task.done() or len(self._files() - there) >= strike.number)
            case Moment.AFTER:
                await call()

    async def _quiet(self, acks: int) -> None:
        """Let others go on until there are so many acks, or none has anything under way for a while."""
        turns = 0
        while turns < _QUIET_TURNS and self._journal.acks < acks:
            seen = len(self.operations)
            await asyncio.sleep(0)
            turns = 0 if self._under_way or len(self.operations) > seen else turns + 1

    @staticmethod
    async def _until(is_so: Callable[[], bool]) -> None:
        while not is_so():  # noqa: ASYNC110 - the storage's threads do not tell
            await asyncio.sleep(0)

    def _files(self) -> set[str]:
        return {os.path.join(path, name) for path, _, names in os.walk(self._place) for name in names}


class _Watched:
    """A handle of SlateDB, and those that it hands out."""

    def __init__(self, native: Any, dying: Dying) -> None:
        self._native = native
        self._dying = dying

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._native, name)

        async def call(*arguments: Any) -> Any:
            made = await self._dying.run(name, lambda: method(*arguments))
            binding = slatedb()
            handles = (binding.DbSnapshot, binding.WriteHandle)
            return self._dying.watched(made) if isinstance(made, handles) else made

        return call


LifeOf = Callable[[Path, Journal], Coroutine[Any, Any, None]]


def _lead(life: LifeOf, strike: Strike | None, place: Path, journal: Journal) -> None:
    """The whole of a process: it ends here, in one way or another."""
    signal.alarm(_LIFE_S)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    dying, opened = Dying(strike, place, journal), slate._opened

    async def watched(*arguments: Any) -> Any:
        return dying.watched(await dying.run("open", lambda: opened(*arguments)))

    slate._opened = watched  # type: ignore[assignment]
    try:
        asyncio.run(life(place, journal))
        journal.tell(ended=dying.operations)
        os._exit(0)
    except BaseException:
        journal.tell(failure=traceback.format_exc())
        os._exit(1)


def _serve(life: LifeOf) -> None:
    """Lead the lives that are asked for, one after the other; answer with what was told and how it ended."""
    slatedb()
    gc.freeze()  # or each child would copy what it only looks at
    for line in sys.stdin:
        asked = json.loads(line)
        strike = asked["strike"] and Strike(**asked["strike"] | {"moment": Moment(asked["strike"]["moment"])})
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            os.close(reads)
            _lead(life, strike, Path(asked["place"]), Journal(writes))
        os.close(writes)
        with open(reads, encoding="utf-8") as told:
            lines = told.readlines()
        _, status = os.waitpid(child, 0)
        answer = {"status": os.waitstatus_to_exitcode(status), "told": lines}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Lives:
    """Lives of one kind: `life` of the module with this name, each in a process of its own."""

    def __init__(self, module: str) -> None:
        sources = Path(penstock.__file__).parents[1]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
        kept |= {"PYTHONPATH": f"{sources}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.slate_crash", module],
            env=kept,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()

    def whole(self, place: Path, *, after: Life | None = None) -> Life:
        """A life that nothing ends before its time, behind another one if it is to be."""
        self._ask(None, place, after)
        return self._answer(None, place, after)

    def ended(self, strikes: Iterable[Strike], place: Path, *, after: Life | None = None) -> Iterator[Life]:
        """A life for each of these, in a directory of its own. The next one is led while one is looked at."""
        asked: list[tuple[Strike, Path]] = []
        for strike in strikes:
            directory = place / f"{strike.moment}-{strike.operation}-{strike.number}"
            self._ask(strike, directory, after)
            asked.append((strike, directory))
            if len(asked) > 1:
                yield self._answer(*asked.pop(0), after)
        for strike, directory in asked:
            yield self._answer(strike, directory, after)

    def _ask(self, strike: Strike | None, place: Path, after: Life | None) -> None:
        if after is None:
            place.mkdir()
        else:
            shutil.copytree(after.place, place)
        asked = {"strike": strike and asdict(strike), "place": str(place)}
        _pipe(self._process.stdin).write(json.dumps(asked) + "\n")
        _pipe(self._process.stdin).flush()

    def _answer(self, strike: Strike | None, place: Path, after: Life | None) -> Life:
        answer = json.loads(_pipe(self._process.stdout).readline())
        life = Life(strike=strike, place=place, status=answer["status"])
        if after is not None:
            life.sent, life.durable = [*after.sent], {**after.durable}
        for line in answer["told"]:
            said = json.loads(line)
            if "sent" in said:
                life.sent.append(said["sent"])
            elif "durable" in said:
                life.durable[said["durable"]] = said["ids"]
            else:
                life.died |= "died" in said
                life.operations = said.get("died") or said.get("ended") or life.operations
                life.failure = said.get("failure", life.failure)
        return life


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


class Sweep:
    """Lets a process die at each point of a life, and has `check` open and judge what it left."""

    def __init__(self, lives: Lives, check: Callable[[Life], Coroutine[Any, Any, None]]) -> None:
        self._lives = lives
        self._check = check
        self._operations: list[str] = []

    def run(self, moment: Moment, place: Path, *, every: int = 1) -> int:
        """A life that begins with nothing. Of `every` point one, others for each moment; returns how many."""
        return self._strike(self._of_a_whole_life(place), moment, place / f"{moment}", every)

    def run_again(self, moment: Moment, place: Path, *, every: int = 1) -> int:
        """As `run`, with the first part of a life that takes over from one which died while it synced."""
        operations = self._of_a_whole_life(place)
        syncs = [number for number, name in enumerate(operations, 1) if name == "flush_with_options"]
        halfway = Strike(operation=syncs[len(syncs) // 2], moment=Moment.STORED, number=1)
        place = place / f"again-{moment}"
        place.mkdir()
        (first,) = self._lives.ended([halfway], place)
        _check_death(first)
        whole = self._lives.whole(place / "whole", after=first)
        assert whole.status == 0, whole.failure
        part = whole.operations[: whole.operations.index("shutdown") + 1]
        return self._strike(part, moment, place / f"{moment}", every, first)

    def check_the_end(self, place: Path) -> None:
        """There is no point behind the last of a life."""
        operations = self._of_a_whole_life(place)
        behind = Strike(operation=len(operations) + 1, moment=Moment.BEFORE)
        (life,) = self._lives.ended([behind], place)
        assert life.status == 0, life.failure
        assert not life.died, life.operations

    def _of_a_whole_life(self, place: Path) -> list[str]:
        """What there is to strike at: of two lives the longer one, for one sync may do for two flushes."""
        if not self._operations:
            both = [self._lives.whole(place / name) for name in ("whole", "as-whole")]
            for whole in both:
                assert whole.status == 0, whole.failure
                assert whole.last_durable == whole.last_sent
                asyncio.run(self._check(whole))
            self._operations = max((whole.operations for whole in both), key=len)
        return self._operations

    def _strike(
        self, operations: Sequence[str], moment: Moment, place: Path, every: int, after: Life | None = None
    ) -> int:
        points = strikes(operations, moment)[list(Moment).index(moment) % every :: every]
        place.mkdir()
        left = points
        for _ in range(_ATTEMPTS):
            missed = []
            for dead in self._lives.ended(left, place, after=after):
                if dead.strike is not None and dead.status == 0:
                    missed.append(dead.strike)
                else:
                    _check_death(dead)
                try:
                    asyncio.run(self._check(dead))
                except BaseException as error:
                    error.add_note(f"{dead.strike} left this in {dead.place}")
                    raise
                shutil.rmtree(dead.place)
            left = missed
        assert not left, f"never reached: {left}"
        return len(points)


def _check_death(dead: Life) -> None:
    """It died where it was to die, and not otherwise."""
    strike = dead.strike
    assert strike is not None
    assert dead.died, f"{strike} was not reached: {dead.failure}"
    killed = {-signal.SIGKILL, -signal.SIGXFSZ} if strike.moment is Moment.TORN else {-signal.SIGKILL}
    assert dead.status in killed, f"{strike}: {dead.status}, {dead.failure}"


if __name__ == "__main__":
    _serve(importlib.import_module(sys.argv[1]).life)
