"""One cap for several cores: borrowing quota, taking turns, and silent cores."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidInput
from penstock.quiver.quota import Quota
from penstock.quiver.retention.shared_quota import (
    NOTHING_OLD,
    CoreSlot,
    SharedQuota,
    decode_slot,
    encode_slot,
)
from penstock.testing.clock import ManualClock
from penstock.testing.disk import FakeDisk

ROOT = "/data"


class Machine:
    """Three cores of one directory with a cap of 3000 bytes, in segments of 100."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.disk = FakeDisk(clock=self.clock)
        self.disk.make_dirs(ROOT)
        self.cores = [self.core(number) for number in range(3)]

    def core(self, number: int, cores: int = 3) -> SharedQuota:
        return SharedQuota(
            self.disk,
            ROOT,
            core_id=number,
            cores=cores,
            cap_bytes=3000,
            target_bytes=100,
            clock=self.clock,
        )

    def say(self, *used: int, oldest: tuple[int | None, ...] = (1, 2, 3)) -> None:
        for core, bytes_used, oldest_ns in zip(self.cores, used, oldest, strict=True):
            core.publish(used=bytes_used, reclaimable=0, oldest_ns=oldest_ns)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_core_may_use_the_quota_that_the_others_leave(machine: Machine) -> None:
    machine.say(0, 600, 700)
    assert machine.cores[0].limit() == 3000 - 300 - 1300
    assert machine.cores[1].limit() == 3000 - 300 - 700 - 500, (
        "half a share is left to a core that uses nothing"
    )


def test_a_core_can_always_use_half_of_its_share(machine: Machine) -> None:
    machine.say(0, 1400, 1400)
    quota = Quota(machine.disk, ROOT, hard_bytes=1000, target_bytes=100, limit=machine.cores[0].limit)
    assert quota.hard_bytes == 500
    machine.say(0, 100, 100)
    assert quota.hard_bytes == 1700
    assert quota.soft_bytes == 1600


def test_cores_that_use_their_whole_limit_stay_below_the_cap(machine: Machine) -> None:
    used = [0, 0, 0]
    for turn in range(60):
        core = turn * 7 % 3
        used[core] = max(used[core], min(used[core] + 300, machine.cores[core].limit()))
        machine.say(*used)
    assert 2000 < sum(used) <= 3000 - 300


def test_all_cores_together_leave_room_for_one_segment_each(machine: Machine) -> None:
    machine.say(1000, 1000, 700)
    assert machine.cores[0].excess() == 0
    machine.say(1000, 1000, 701)
    assert machine.cores[0].excess() == 1


def test_the_core_with_the_oldest_data_has_the_turn(machine: Machine) -> None:
    machine.say(1000, 1000, 1000, oldest=(30, 10, 20))
    assert [core.is_our_turn() for core in machine.cores] == [False, True, False]
    machine.say(1000, 1000, 1000, oldest=(30, None, 30))
    assert [core.is_our_turn() for core in machine.cores] == [True, False, False]


def test_no_core_has_a_turn_while_there_is_room(machine: Machine) -> None:
    machine.say(100, 100, 100)
    with machine.cores[0].turn() as is_ours:
        assert not is_ours


def test_two_cores_never_drop_for_the_same_excess(machine: Machine) -> None:
    machine.say(1000, 1000, 1000)
    with machine.cores[0].turn() as ours, machine.cores[1].turn() as theirs:
        assert (ours, theirs) == (True, False)


async def test_a_silent_core_still_counts_and_has_no_turn(machine: Machine) -> None:
    machine.say(1000, 1000, 1000)
    await machine.clock.advance(11)
    for core in machine.cores[1:]:
        core.publish(used=1000, reclaimable=0, oldest_ns=5)
    assert machine.cores[1].excess() == 300
    assert machine.cores[1].is_our_turn()
    assert machine.cores[0].is_our_turn(), "a core counts itself as alive; the lock decides"


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000, 86_400_000])
async def test_a_wall_clock_step_neither_silences_nor_revives_a_core(machine: Machine, step_ms: int) -> None:
    machine.say(1000, 1000, 1000)
    assert not machine.cores[1].is_our_turn()
    machine.clock.jump_wall(step_ms)
    assert not machine.cores[1].is_our_turn(), "core 0 published a moment ago"
    await machine.clock.advance(9)
    assert not machine.cores[1].is_our_turn()
    await machine.clock.advance(2)
    assert machine.cores[1].is_our_turn()
    machine.cores[0].publish(used=1000, reclaimable=0, oldest_ns=1)
    assert not machine.cores[1].is_our_turn()


def test_a_slot_that_is_being_written_keeps_its_previous_value(machine: Machine) -> None:
    machine.say(100, 200, 300)
    assert machine.cores[0].slots()[1].used == 200
    machine.disk.open_log(f"{ROOT}/budget.shm").write_at(64, [b"\xff" * 8])
    assert machine.cores[0].slots()[1].used == 200


def test_a_slot_is_decoded_unchanged_and_zeros_are_not_a_slot() -> None:
    slot = CoreSlot(used=1, reclaimable=2, oldest_ns=3, heartbeat_ns=4, process=5, turn=6)
    assert decode_slot(encode_slot(slot)) == slot
    assert len(encode_slot(slot)) == 64
    assert decode_slot(bytes(64)) is None
    assert CoreSlot().oldest_ns == NOTHING_OLD


def test_an_invalid_core_number_is_refused(machine: Machine) -> None:
    with pytest.raises(InvalidInput, match="not between 0 and 2"):
        machine.core(3)
    with pytest.raises(InvalidInput, match="fewer than 4"):
        machine.core(0, cores=4)
