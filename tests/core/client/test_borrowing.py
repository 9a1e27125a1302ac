"""One copy a host: a rollout uses the memory of another one of its host where it lies, whatever becomes of either."""

from __future__ import annotations

import errno
import faulthandler
import gc
import mmap
import os
import signal
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import pytest
import torch
from client_processes import SEGMENT, SEGMENTS, SIZE, Borrower, Process, hold_back, let_go, same_bytes, tensors_of
from client_stage import FAR, HELD, NEAR, RUNTIME, holders, until, what_is_there

from tensorhub_plugins.core import CHECKPOINT, CorruptBytes, ShardKey, UsageError, spec_of
from tensorhub_plugins.core.memory import inherited
from tensorhub_plugins.core.memory.loans import Loans
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.limits import DEFAULT_LIMITS
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.shm import memory_file
from tensorhub_plugins.core.transports.shm.memory_file import MappingCache
from tensorhub_plugins.core.transports.shm.source import ShmSource

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12, for what this is about

SHM = {"transports": ("shm", "tcp")}


def borrowed(fetched: Any) -> bool:
    return fetched.slab.kind == "borrowed"


def memory_of_slabs() -> int:
    """Bytes that the kernel has given to slabs that this process has open or mapped, each file once."""
    sizes: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if os.readlink(path).startswith("/memfd:tensorhub"):
                status = os.stat(path)
                sizes[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(sizes.values())


@pytest.fixture
def fleet(stage):
    """A rollout that has version 1 in its own layout in host memory, and three that have nothing."""
    first, *others = (stage.client(f"rollout-{k}", **SHM) for k in range(4))
    first.retain(0)  # nothing stays but by a loan
    first.publish(1, tensors_of(1), RUNTIME)
    return first, others


def test_rollouts_of_a_host_have_one_copy_between_them(fleet):
    first, others = fleet
    before = memory_of_slabs()
    fetched = [client.fetch(1, (RUNTIME,), serve=True, borrow=True) for client in others]
    assert all(borrowed(one) and same_bytes(one.tensors(), tensors_of(1)) for one in fetched)
    assert memory_of_slabs() == before > SIZE
    # Each is a source like any other: also of what others then borrow, or copy.
    assert set(holders(first, 1, RUNTIME)) == {f"rollout-{k}/0" for k in range(4)}
    assert [one.report.transports for one in fetched] == [{"shm": SIZE}] * 3

    copied = others[0].fetch(1, (RUNTIME,))  # the control: who does not ask for a loan takes memory
    assert not borrowed(copied) and memory_of_slabs() >= before + SIZE


def test_memory_that_is_lent_is_not_written_to_until_it_is_given_back(fleet):
    first, (second, *_) = fleet
    fetched = second.fetch(1, (RUNTIME,), borrow=True)
    slab = first.find(ShardKey(1, RUNTIME)).slab
    first.unpublish(1)
    first.publish(2, tensors_of(2), RUNTIME)  # in other memory
    assert first.find(ShardKey(2, RUNTIME)).slab is not slab
    assert same_bytes(fetched.tensors(), tensors_of(1))

    again = first.find(ShardKey(2, RUNTIME)).slab
    fetched.release()
    first.unpublish(2)
    first.publish(3, tensors_of(3), RUNTIME)
    assert first.find(ShardKey(3, RUNTIME)).slab is again  # of which there was no loan


@pytest.mark.parametrize("serve", [False, True])
def test_tensors_that_are_kept_keep_the_loan(fleet, serve):
    """Also when nothing else is: neither what `fetch` has returned, nor an offer."""
    first, (second, third, _) = fleet
    tensors = second.fetch(1, (RUNTIME,), borrow=True, serve=serve).tensors()
    first.publish(2, tensors_of(2), RUNTIME)
    second.fetch(2, (RUNTIME,), borrow=True)
    until(lambda: ShardKey(1, RUNTIME) not in second.serving())
    gc.collect()
    assert first.find(ShardKey(1, RUNTIME)).slab.is_lent
    first.unpublish(1)
    for version in (3, 4):
        first.publish(version, tensors_of(version), RUNTIME)
        first.unpublish(version - 1)
    assert same_bytes(tensors, tensors_of(1))


def test_a_loan_ends_with_the_last_tensor(fleet):
    first, (second, *_) = fleet
    slab = first.find(ShardKey(1, RUNTIME)).slab
    tensor = second.fetch(1, (RUNTIME,), borrow=True).tensors()["rest"][10:]
    gc.collect()
    assert slab.is_lent
    del tensor
    gc.collect()
    until(lambda: not slab.is_lent)


def test_a_loan_ends_without_the_help_of_the_garbage_collector(fleet):
    """Which may not come for a hundred versions, each of them the size of a model."""
    first, (second, *_) = fleet
    slab = first.find(ShardKey(1, RUNTIME)).slab
    gc.collect()
    gc.disable()
    try:
        tensors = second.fetch(1, (RUNTIME,), borrow=True).tensors()
        assert slab.is_lent
        del tensors
        until(lambda: not slab.is_lent)  # a thread of the client may still be about to end the call
    finally:
        gc.enable()


def test_who_cannot_lend_or_borrow_leaks_nothing(monkeypatch):
    """Out of descriptors in the midst of it."""
    slab = Slab.allocate([spec_of("a", torch.zeros(1 << 16, dtype=torch.uint8))])
    offer = Offer(ShardKey(1, RUNTIME), slab.manifest(), slab, lends=True)
    fd, liveness = slab.shared_fd, slab.owner_liveness_fd
    loan, mappings, dup = slab.lend(), MappingCache(), os.dup

    def fails(*_: object) -> int:
        raise OSError(errno.EMFILE, "none left")

    gc.collect()  # what earlier tests have left
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(Slab, "lend", fails)
    with pytest.raises(OSError):
        ShmSource(DEFAULT_LIMITS).send_memory(None, offer, 1e18, lends=True)
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(os, "dup", lambda one: fails() if one == liveness else dup(one))
    with pytest.raises(OSError):
        mappings.borrow(slab.specs, fd, liveness, loan, None, is_shared=False)
    assert len(os.listdir("/proc/self/fd")) == before
    mappings.close()
    loan.close()
    slab.close()


def pipes() -> int:
    """Return how many descriptors of pipes are open: loans are some, and what clients do aside opens sockets."""
    kinds = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            kinds.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(kind.startswith("pipe:") for kind in kinds)


def test_many_loans_take_one_descriptor_of_the_lender(fleet):
    first, (second, *_) = fleet
    slab = first.find(ShardKey(1, RUNTIME)).slab
    slab.lend().close()
    gc.collect()  # what earlier tests have left
    before = pipes()
    loans = [slab.lend() for _ in range(100)]
    assert pipes() == before + 100  # the borrowers' own, which are here, too
    for loan in loans[1:]:
        loan.close()
    assert slab.is_lent
    loans[0].close()
    assert not slab.is_lent and pipes() == before


def test_without_a_loan_it_would_be_written_to(fleet, monkeypatch):
    first, (second, *_) = fleet
    monkeypatch.setattr(Loans, "any", property(lambda self: False))
    fetched = second.fetch(1, (RUNTIME,), borrow=True)
    first.unpublish(1)
    first.publish(2, tensors_of(2), RUNTIME)
    assert same_bytes(fetched.tensors(), tensors_of(2))


@pytest.mark.parametrize("layout", [RUNTIME, CHECKPOINT], ids=["shared", "private"])
@pytest.mark.parametrize("is_kept", [True, False], ids=["", "control"])
def test_a_forked_child_does_not_read_a_later_version_under_borrowed_tensors(stage, monkeypatch, layout, is_kept):
    """It dies, as it has neither the memory nor a loan. The control: its lender has written the next version there."""
    if not is_kept:
        monkeypatch.setattr(memory_file, "KeptFromChildren", lambda mapped: None)
    first, second = (stage.client(f"rollout-{k}", **SHM) for k in range(2))
    first.retain(0)
    stage.client("trainer", **SHM).publish(1, tensors_of(1), layout)
    lent = first.fetch(1, (layout,), serve=True)
    fetched = second.fetch(1, (layout,), borrow=True)
    tensors, kind = fetched.tensors(), fetched.slab.kind
    assert kind == "borrowed" and same_bytes(tensors, tensors_of(1))
    monkeypatch.setattr(inherited, "_holders", WeakSet())  # as in a process that lends nothing itself
    go_on, goes_on = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.disable()  # it is meant to die
        os.read(go_on, 1)
        mmap.mmap(-1, SIZE)  # which could come to lie where the tensors were
        os._exit(1 if same_bytes(tensors, tensors_of(1)) else 2)
    slab = lent.slab
    fetched.release()
    second.close()
    del tensors, fetched
    gc.collect()
    until(lambda: not slab.is_lent)
    with slab.writable(0, slab.size_bytes) as views:  # as the next fetch does
        for view in views:
            view[:] = bytes(len(view))
    os.write(goes_on, b"x")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(go_on)
    os.close(goes_on)
    assert code == (-signal.SIGSEGV if is_kept else 2)


def test_a_child_unmaps_nothing_else_in_the_end(fleet):
    """What it has mapped since is its own."""
    _, (second, *_) = fleet
    fetched = second.fetch(1, (RUNTIME,), borrow=True)
    tensors = fetched.tensors()
    child = os.fork()
    if not child:
        others = [mmap.mmap(-1, SIZE) for _ in range(8)]
        tensors.clear()
        del fetched
        gc.collect()
        for other in others:
            other[:] = b"x" * SIZE
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same_bytes(tensors, tensors_of(1))


def test_what_was_borrowed_is_offered_until_the_next_fetch_and_then_given_back(fleet):
    first, (second, *_) = fleet
    fetched = second.fetch(1, (RUNTIME,), serve=True, borrow=True)
    slab = first.find(ShardKey(1, RUNTIME)).slab
    fetched.release()  # it is still offered
    assert slab.is_lent and second.serving() == [ShardKey(1, RUNTIME)]
    first.publish(2, tensors_of(2), RUNTIME)
    second.fetch(2, (RUNTIME,), serve=True, borrow=True)
    until(lambda: second.serving() == [ShardKey(2, RUNTIME)] and not slab.is_lent)
    first.unpublish(1)
    first.publish(3, tensors_of(3), RUNTIME)
    assert first.find(ShardKey(3, RUNTIME)).slab is slab


def test_a_loan_is_passed_on(fleet):
    first, (second, third, _) = fleet
    mine = second.fetch(1, (RUNTIME,), serve=True, borrow=True)
    first.unpublish(1)
    theirs = third.fetch(1, (RUNTIME,), borrow=True)  # second is all that is left
    assert theirs.report.sources == {"rollout-1/0": SIZE} and borrowed(theirs)
    second.unpublish(1)
    mine.release()
    del mine
    gc.collect()
    (slab,) = first._serving.pool._free
    assert slab.is_lent  # to third, by way of second
    theirs.release()
    assert not slab.is_lent


def test_a_slab_that_its_owner_may_write_to_is_not_lent(stage):
    """After an unpublish its memory may change, and borrowers are not cut off."""
    first, second = (stage.client(f"rollout-{k}", **SHM) for k in range(2))
    first.retain(0)
    slab = first.allocate([spec_of(name, tensor) for name, tensor in tensors_of(1).items()])
    for name, tensor in tensors_of(1).items():
        slab.write(name, tensor)
    first.publish(1, slab, RUNTIME)
    fetched = second.fetch(1, (RUNTIME,), borrow=True)
    assert not borrowed(fetched) and not slab.is_lent
    first.unpublish(1)
    slab.write("rest", torch.zeros_like(tensors_of(1)["rest"]))
    assert same_bytes(fetched.tensors(), tensors_of(1))


def test_nobody_writes_to_what_is_borrowed(fleet):
    _, (second, *_) = fleet
    slab = second.fetch(1, (RUNTIME,), borrow=True).slab
    with pytest.raises(UsageError, match="another worker's"):
        slab.write("rest", torch.zeros_like(tensors_of(1)["rest"]))
    with pytest.raises(UsageError, match="another worker's"), slab.writable(0, 8):
        pass


def test_what_a_loader_writes_into_a_borrowed_checkpoint_stays_with_it(stage):
    trainer, first, second = (stage.client(name, **SHM) for name in ("trainer", "rollout-0", "rollout-1"))
    trainer.retain(0)
    trainer.publish(1, tensors_of(1))
    own = first.fetch(1, serve=True, borrow=True)
    assert not borrowed(own)  # a trainer does not lend
    trainer.unpublish(1)
    mine = second.fetch(1, borrow=True)
    assert borrowed(mine)
    mine.tensors()["rest"].zero_()
    assert same_bytes(own.tensors(), tensors_of(1))


def test_who_is_on_another_host_borrows_nothing(stage):
    first, second = stage.client("rollout-0", **SHM), stage.client("rollout-1", location=FAR, **SHM)
    first.publish(1, tensors_of(1), RUNTIME)
    fetched = second.fetch(1, (RUNTIME,), borrow=True)
    assert not borrowed(fetched) and same_bytes(fetched.tensors(), tensors_of(1)) and NEAR.host != FAR.host


def test_parts_of_a_checkpoint_and_live_tensors_are_read_as_ever(fleet):
    first, (second, third, _) = fleet
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(1).items()}
    assert second.fetch(1, (RUNTIME,), into=live, borrow=True).slabs == {} and same_bytes(live, tensors_of(1))
    first.publish(1, tensors_of(1))
    fetched = third.fetch(1, wanted=[spec for spec in first.find(ShardKey(1, CHECKPOINT)).slab.specs][:2], borrow=True)
    assert not borrowed(fetched) and fetched.slab.size_bytes < SIZE


def test_live_weights_are_lent_as_one_copy_for_all(stage):
    first, *others = (stage.client(f"rollout-{k}", **SHM) for k in range(4))
    first.retain(0)
    first.publish(1, tensors_of(1), RUNTIME, copy=False)
    before = memory_of_slabs()
    fetched = [client.fetch(1, (RUNTIME,), borrow=True) for client in others]
    assert all(borrowed(one) and same_bytes(one.tensors(), tensors_of(1)) for one in fetched)
    assert SIZE < memory_of_slabs() - before < 2 * SIZE
    first.unpublish(1)
    first.publish(2, tensors_of(2), RUNTIME, copy=False)
    again = others[0].fetch(2, (RUNTIME,), borrow=True)
    assert same_bytes(again.tensors(), tensors_of(2))
    assert all(same_bytes(one.tensors(), tensors_of(1)) for one in fetched)  # nothing was copied over them


# --- the bytes are looked at all the same ---


def test_corrupt_memory_of_a_lender_is_found_out(fleet):
    first, (second, *_) = fleet
    first.find(ShardKey(1, RUNTIME)).slab.tensors()["rest"][100] ^= 1
    with pytest.raises(CorruptBytes, match="rest"):
        second.fetch(1, (RUNTIME,), borrow=True, timeout_s=20)
    assert second.serving() == []


def test_another_source_serves_what_a_lender_has_corrupt(fleet):
    first, (second, third, _) = fleet
    second.fetch(1, (RUNTIME,), serve=True)
    first.find(ShardKey(1, RUNTIME)).slab.tensors()["rest"][100] ^= 1
    fetched = third.fetch(1, (RUNTIME,), borrow=True, timeout_s=20)
    assert same_bytes(fetched.tensors(), tensors_of(1))


# --- lenders and borrowers that die ---


@pytest.fixture
def rollout(stage):
    def make(replica: str) -> Process:
        options = {"transports": ("shm", "tcp"), "location": NEAR, "run": stage.run}
        process = Process(Borrower, stage.address, replica, **options)
        stage.open.append(process)
        return process

    return make


def test_what_was_borrowed_of_a_worker_that_is_killed_stays(stage, rollout):
    lender, borrower, last = rollout("rollout-0"), rollout("rollout-1"), stage.client("rollout-2", **SHM)
    lender.call("publish_runtime", 1)
    assert borrower.call("borrow", 1) == "borrowed"
    lender.kill()
    assert borrower.call("is_right", 1)
    fetched = last.fetch(1, (RUNTIME,), borrow=True, timeout_s=30)  # and is a source of it
    assert fetched.report.sources == {"rollout-1/0": SIZE} and same_bytes(fetched.tensors(), tensors_of(1))


def test_a_lender_that_is_killed_before_all_is_there_costs_one_retry(stage, rollout, progress):
    lender, spare = rollout("rollout-0"), stage.client("rollout-1", location=FAR, **SHM)
    lender.call("publish_runtime", 1, HELD)
    spare.publish(1, tensors_of(1), RUNTIME)
    reader = stage.client("rollout-2", **SHM)
    reading = stage.begin(reader.fetch, 1, (RUNTIME,), serve=True, borrow=True)
    progress.wait("rollout-2", HELD)  # all that it has is borrowed
    (key,) = reader.serving()
    before = reader.find(key).created_after
    lender.kill()
    fetched = reading.result(timeout=30)
    assert reader.find(key).created_after > before  # who was sent there for what lay with the lender is sent away
    assert same_bytes(fetched.tensors(), tensors_of(1)) and not borrowed(fetched)
    assert fetched.report.sources == {"rollout-1/0": SIZE}
    assert len(progress.of("rollout-2")) == HELD + SEGMENTS == HELD + SIZE // SEGMENT


def test_a_borrower_that_is_killed_gives_back_what_it_had(stage, rollout):
    lender, borrower = stage.client("rollout-0", **SHM), rollout("rollout-1")
    lender.retain(0)
    lender.publish(1, tensors_of(1), RUNTIME)
    assert borrower.call("borrow", 1) == "borrowed"
    slab = lender.find(ShardKey(1, RUNTIME)).slab
    assert slab.is_lent
    borrower.kill()
    until(lambda: not slab.is_lent)
    lender.unpublish(1)
    lender.publish(2, tensors_of(2), RUNTIME)
    assert lender.find(ShardKey(2, RUNTIME)).slab is slab


def test_what_arrives_at_a_lender_is_used_by_others_as_it_comes(stage, progress):
    source, lender, reader = (stage.client(f"rollout-{k}", **SHM) for k in range(3))
    source.publish(1, tensors_of(1), RUNTIME)
    hold_back(source, 1, HELD, RUNTIME)
    first = stage.begin(lender.fetch, 1, (RUNTIME,), serve=True)
    progress.wait("rollout-1", HELD)
    second = stage.begin(reader.fetch, 1, (RUNTIME,), borrow=True)
    progress.wait("rollout-2", HELD)
    let_go(source, 1, RUNTIME)
    assert same_bytes(first.result(timeout=30).tensors(), tensors_of(1))
    assert same_bytes(second.result(timeout=30).tensors(), tensors_of(1)) and borrowed(second.result())


@pytest.mark.slow
def test_nothing_is_left_open(stage):
    first, second = stage.client("rollout-0", **SHM), stage.client("rollout-1", **SHM)
    first.retain(0)
    counts = []
    for version in range(1, 6):
        first.publish(version, tensors_of(version), RUNTIME)
        fetched = second.fetch(version, (RUNTIME,), borrow=True)
        first.unpublish(version)
        fetched.release()
        del fetched
        gc.collect()
        counts.append(len(what_is_there()[1]))
    assert sorted(set(counts)) != counts, f"some more with each version: {counts}"  # those of others come and go
