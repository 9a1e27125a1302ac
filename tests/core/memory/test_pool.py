"""Slabs that are kept for the next version, and let go when the tensors change."""

from __future__ import annotations

import threading

import pytest
import torch

from tensorhub_plugins.core.errors import ResourceRefused, UsageError
from tensorhub_plugins.core.memory import pinning
from tensorhub_plugins.core.memory.pool import IDLE_ROUNDS_MAX, POOLED_SLABS_MAX, SlabPool
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of

OLD, NEW = [spec_of("w", torch.zeros(10))], [spec_of("w", torch.zeros(11))]


@pytest.fixture
def pool():
    pool = SlabPool()
    yield pool
    pool.close()


def is_closed(slab: Slab) -> bool:
    try:
        slab.tensors()
    except UsageError:
        return True
    return False


def test_a_slab_is_used_again_and_counts_as_unwritten(pool):
    slab = pool.take(OLD)
    slab.write("w", torch.ones(10))
    pool.give_back(slab)
    pool.give_back(slab)  # twice is fine
    assert pool.take(NEW) is not slab and pool.take(OLD) is slab and slab.unwritten == ("w",)
    assert pool.take(OLD) is not slab


def test_a_slab_that_is_in_use_again_is_not_given_back_by_its_old_user(pool):
    slab = pool.take(OLD)
    before = pool.hand_out(slab)
    pool.give_back(slab, before)
    assert pool.take(OLD) is slab
    pool.give_back(slab, before)
    assert pool.take(OLD) is not slab


def test_only_so_many_are_kept_and_strangers_never(pool):
    slabs = [pool.take(OLD) for _ in range(POOLED_SLABS_MAX + 1)]
    for slab in slabs:
        pool.give_back(slab)
    assert [is_closed(slab) for slab in slabs] == [False] * POOLED_SLABS_MAX + [True]
    theirs, once = Slab.allocate(OLD), pool.take_once(OLD)
    for slab in (theirs, once):
        pool.give_back(slab)
        assert pool.hand_out(slab) == 0
    assert is_closed(once) and not is_closed(theirs)


def test_what_is_given_back_twice_stays_where_no_more_are_kept(pool):
    slabs = [pool.take(OLD) for _ in range(POOLED_SLABS_MAX)]
    for slab in [*slabs, slabs[0]]:
        pool.give_back(slab)
    assert not is_closed(slabs[0]) and {pool.take(OLD) for _ in slabs} == set(slabs)


def test_slabs_of_tensors_that_come_no_more_are_let_go(pool):
    old = [pool.take(OLD), pool.take(OLD)]
    for slab in old:
        pool.give_back(slab)
    for _ in range(IDLE_ROUNDS_MAX * 3 + 1):
        pool.give_back(pool.take(NEW))
    assert all(map(is_closed, old))


def test_tensors_that_are_others_each_time_take_no_more_memory_each_time(pool):
    slabs = []
    for size in range(10 * IDLE_ROUNDS_MAX):
        slabs.append(pool.take([spec_of("w", torch.zeros(1 + size))]))
        pool.give_back(slabs[-1])
    assert sum(not is_closed(slab) for slab in slabs) <= IDLE_ROUNDS_MAX + 1


def test_slabs_that_are_taken_in_turn_are_all_kept(pool):
    shards = [[spec_of(f"w{k}", torch.zeros(10))] for k in range(6)]
    first = [pool.take(specs) for specs in shards]
    for _ in range(4 * IDLE_ROUNDS_MAX):
        for slab in first:
            pool.give_back(slab)
        assert [pool.take(specs) for specs in shards] == first


def test_what_is_given_back_to_a_closed_pool_is_closed():
    pool = SlabPool()
    used, lies = pool.take(OLD), pool.take(OLD)
    pool.give_back(lies)
    pool.close()
    assert is_closed(lies) and not is_closed(used)
    pool.give_back(used)
    assert is_closed(used)


def test_one_that_was_needed_once_is_let_go(pool):
    """A reader was late, and a third one was taken: the other two go on in turn."""
    one, two, third = (pool.take(OLD) for _ in range(3))
    pool.give_back(one)
    pool.give_back(third)
    held = two
    for _ in range(IDLE_ROUNDS_MAX * 3 + 2):
        taken = pool.take(OLD)
        pool.give_back(held)
        held = taken
    assert [is_closed(slab) for slab in (one, two, third)].count(True) == 1


def test_what_is_lent_is_for_nobody_else(pool):
    slab = pool.take(OLD)
    loan = slab.lend()
    pool.give_back(slab)
    assert pool.take(OLD) is not slab and is_closed(slab)  # whose memory is the borrower's now
    loan.close()
    another = pool.take(OLD)
    another.lend().close()
    pool.give_back(another)
    assert pool.take(OLD) is another  # the control: it was given back in time


# --- memory that is made before it is written ---


@pytest.fixture
def made(monkeypatch):
    """Where the pages of memory were made in the background, in order."""
    addresses: list[int] = []
    monkeypatch.setattr(pinning, "_populate", lambda memory: addresses.append(memory.data_ptr()))
    return addresses


def address_of(slab: Slab) -> int:
    return slab.tensors()["w"].data_ptr()


def test_what_is_reserved_is_made_in_the_background_and_taken_in_that_order(pool, made):
    pool.reserve(OLD, 5)
    assert pinning.wait_for_background(60) and len(made) == POOLED_SLABS_MAX
    first, second = pool.take(OLD), pool.take(OLD)
    assert [address_of(first), address_of(second)] == made
    assert first.unwritten == ("w",) and first.unpinned == "" and first.copying_device is None
    pool.take(OLD)  # it is written at once: the control
    assert pinning.wait_for_background(60) and len(made) == POOLED_SLABS_MAX


def test_what_is_closed_before_it_is_made_is_not_made(pool, made):
    begin = threading.Event()
    pinning._in_background(lambda: begin.wait(60) and None)
    pool.reserve(OLD, 1)
    pool.close()
    begin.set()
    assert pinning.wait_for_background(60) and made == []


def test_a_reservation_that_is_refused_keeps_what_was_allocated_before(pool, monkeypatch):
    allocate, left = Slab.allocate, [1]

    def refuse(*given, **how):
        if not left.pop():
            raise ResourceRefused("no more")
        left.append(0)
        return allocate(*given, **how)

    monkeypatch.setattr(Slab, "allocate", refuse)
    with pytest.raises(ResourceRefused):
        pool.reserve(OLD, 2)
    left.append(0)
    assert not is_closed(pool.take(OLD))
