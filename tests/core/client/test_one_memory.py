"""One memory, one use: what is read into is read into by one call alone, and what is offered is read into by none."""

from __future__ import annotations

import gc

import pytest
import torch
from client_processes import SEGMENTS, hold_back, let_go, same_bytes, tensors_of, zeros_like
from client_stage import HELD, SOON_S

from tensorhub_plugins.core import ShardKey, UsageError, spec_of
from tensorhub_plugins.core.memory import claims
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports import Offer

PUBLISHED = "these tensors are published: unpublish that version before they change"


@pytest.fixture
def reading(stage, progress):
    """A read into these tensors that has begun and cannot end before `goes_on`; the tensors, and the rollout."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    live = zeros_like(tensors_of(1))
    future = stage.begin(rollout.replicate, live, 1, serve=False)
    progress.wait("rollout", HELD)

    def goes_on():
        let_go(trainer, 1)
        future.result(SOON_S)
        assert same_bytes(live, tensors_of(1))

    yield live, rollout, goes_on
    let_go(trainer, 1)


def overlapping(live):
    """Under another name, in another shape: the end of one tensor."""
    return {"other": live["embed"].view(-1)[-100:]}


@pytest.mark.parametrize("alike", [dict, overlapping], ids=["the same", "a view"])
@pytest.mark.parametrize("who", ["this client", "another"])
@pytest.mark.parametrize("how", ["replicate", "fetch", "repair"])
def test_two_reads_do_not_share_memory(stage, reading, who, alike, how):
    """Both would succeed, and the bytes be of both versions."""
    live, rollout, goes_on = reading
    client = rollout if who == "this client" else stage.client("other")
    words = rf"{client.replica}/0 is reading into '.*', and rollout/0 is reading into '.*', which is the same memory"
    with pytest.raises(UsageError, match=words):
        if how == "fetch":
            client.fetch(1, into=alike(live))
        else:
            client.replicate(alike(live), 1, repair=how == "repair")
    goes_on()
    rollout.replicate(live, 1, serve=False)  # it is over


@pytest.mark.parametrize("how", ["in place", "copy", "slab"])
def test_what_is_read_into_is_not_published(stage, reading, how):
    """It would be half of a version, with digests of that."""
    live, _, goes_on = reading
    other = stage.client("other")
    words = "other/0 publishes, as version 2, '.*', and rollout/0 is reading into '.*'"
    with pytest.raises(UsageError, match=words):
        other.publish(2, live, "another", copy=how == "copy")
    assert other.serving() == []
    goes_on()
    other.publish(2, live, "another", copy=how == "copy")


@pytest.mark.parametrize("how", ["in place", "slab", "read", "fetched"])
def test_what_one_client_offers_another_does_not_read_into(stage, how):
    trainer, holder, other = (stage.client(name) for name in ("trainer", "holder", "other"))
    trainer.publish(1, tensors_of(1))
    live = zeros_like(tensors_of(1))
    if how == "in place":
        live = tensors_of(2)
        holder.publish(2, live, "another", copy=False)
    elif how == "slab":
        slab = holder.allocate(trainer.find(trainer.serving()[0]).manifest.tensors)
        live = slab.tensors()
        slab.mark_written()
        holder.publish(2, slab, "another")
    elif how == "read":
        holder.replicate(live, 1)
    else:
        live = holder.fetch(1, serve=True).tensors()
    with pytest.raises(UsageError, match=rf"{PUBLISHED}. other/0 is reading into '.*'.* that version \d, .* has"):
        other.replicate(live, 1)
    (key,) = holder.serving()
    assert holder.recheck(key.version) == ()
    holder.retain(0)
    holder.unpublish(key.version)
    if how in ("in place", "read"):  # else it is the holder's memory still
        other.replicate(live, 1)
        assert same_bytes(live, tensors_of(1))


@pytest.mark.parametrize("ends", ["unpublishes", "leaves", "closes it"])
def test_a_slab_that_two_clients_offer_stays_until_both_have_ended(stage, ends):
    """Its readers would wait until their deadline for a source that fails, and is not lost."""
    one, other, reader = (stage.client(name) for name in ("one", "other", "reader"))
    one.retain(0)
    slab = one.allocate(spec_of(name, tensor) for name, tensor in tensors_of(1).items())
    for name, tensor in tensors_of(1).items():
        slab.write(name, tensor)
    one.publish(1, slab)
    other.publish(1, slab)
    if ends == "closes it":
        slab.close()
    else:
        one.unpublish(1)
    if ends == "leaves":
        one.close()
    elif ends == "unpublishes":
        assert one.allocate(slab.specs) is not slab
    assert same_bytes(reader.fetch(1, timeout_s=5).tensors(), tensors_of(1))
    other.unpublish(1)
    if ends == "closes it":
        assert same_bytes(reader.fetch(1, timeout_s=5).tensors(), tensors_of(1))
        one.unpublish(1)
        assert one.allocate(slab.specs) is not slab  # the next one is open
    with pytest.raises(UsageError, match="the slab is closed"):
        slab.tensors()


def test_memory_that_is_read_into_by_a_fetch_is_read_into_by_nobody_else(stage, progress):
    """Of a fetch that was released: its tensors are not to be used any more, and somebody does."""
    trainer, rollout, other = (stage.client(name) for name in ("trainer", "rollout", "other"))
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
    fetched = rollout.fetch(1)
    stale = fetched.tensors()
    fetched.release()
    hold_back(trainer, 2, HELD)
    future = stage.begin(rollout.fetch, 2)
    progress.wait("rollout", SEGMENTS + HELD)
    with pytest.raises(UsageError, match="rollout/0 is reading into '.*', which is the same memory"):
        other.replicate(stale, 1)
    let_go(trainer, 2)
    assert same_bytes(future.result(SOON_S).tensors(), tensors_of(2))


@pytest.mark.parametrize("gives_back", ["first", "last"])
def test_what_is_offered_of_a_fetch_that_was_released_is_not_fetched_into(stage, gives_back):
    """It would be served, as the old version, with the bytes of the new one. The control: not offered, it is used."""
    trainer, rollout, other = (stage.client(name) for name in ("trainer", "rollout", "other"))
    for version in (1, 2, 3):
        trainer.publish(version, tensors_of(version))
    fetched = rollout.fetch(1)
    live, memory = fetched.tensors(), fetched.tensors()["embed"].data_ptr()
    if gives_back == "first":
        fetched.release()
    rollout.publish(1, live, "another", copy=False)
    fetched.release()
    second = rollout.fetch(2)
    assert second.tensors()["embed"].data_ptr() != memory
    assert same_bytes(live, tensors_of(1)) and rollout.recheck(1) == ()
    taken = zeros_like(tensors_of(1))
    other.replicate(taken, 1, "another")
    assert same_bytes(taken, tensors_of(1))
    memory = second.tensors()["embed"].data_ptr()
    second.release()
    assert rollout.fetch(3).tensors()["embed"].data_ptr() == memory


def test_a_read_that_fails_leaves_its_memory_to_others(stage):
    trainer, rollout, other = (stage.client(name) for name in ("trainer", "rollout", "other"))
    trainer.publish(1, tensors_of(1))
    live = zeros_like(tensors_of(1))
    for _ in range(2):
        with pytest.raises(UsageError, match="is missing|not be updated"):
            rollout.replicate({**live, "more": torch.zeros(3)}, 1)
    other.replicate(live, 1)
    assert same_bytes(live, tensors_of(1))


def test_neighbours_are_not_the_same_memory(stage, reading):
    live, _, goes_on = reading
    with claims.claimed({"rest": torch.zeros(10)}, "somebody reads"):
        pass
    base = torch.zeros(4, 100)
    trainer, other = stage.client("trainer-2"), stage.client("other")
    trainer.publish(7, {"w": torch.ones(100)}, "rows")
    other.replicate({"w": base[1]}, 7, "rows")
    with claims.claimed({"above": base[0], "below": base[2:]}, "somebody reads"):
        assert base.sum() == 100
    goes_on()


def test_without_the_register_bytes_are_of_both(stage, reading, monkeypatch):
    """The control."""
    live, _, goes_on = reading
    monkeypatch.setattr(claims, "_conflict", lambda mine, extents, deadline: None)
    trainer, other = stage.client("trainer-2"), stage.client("other")
    trainer.publish(2, tensors_of(2), "another")
    other.replicate(live, 2, "another")
    with pytest.raises(AssertionError):
        goes_on()
    assert not same_bytes(live, tensors_of(2))


@pytest.fixture
def no_collector():
    """The garbage collector frees nothing that another run of it would not."""
    gc.disable()
    yield
    gc.enable()


def test_a_version_that_is_offered_already_leaves_its_second_memory_free(stage, no_collector):
    """Two buffers by turns: what a read has put where it is not offered from is nobody's but its caller's."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    first, second = zeros_like(tensors_of(1)), zeros_like(tensors_of(1))
    trainer.publish(1, tensors_of(1))
    rollout.replicate(first, 1)
    rollout.replicate(second, 1)
    trainer.publish(2, tensors_of(2))
    with pytest.raises(UsageError, match=PUBLISHED):  # the control
        rollout.replicate(first, 2)
    rollout.replicate(second, 2)
    assert same_bytes(second, tensors_of(2))


def test_a_publish_that_is_refused_leaves_its_memory_free(stage, no_collector):
    trainer, other = stage.client("trainer"), stage.client("other")
    live, wrong = tensors_of(1), tensors_of(2)
    trainer.publish(1, live, copy=False)
    trainer.retain(0)
    trainer.unpublish(1)
    with pytest.raises(UsageError, match="was published here before with other bytes"):
        trainer.publish(1, wrong, copy=False)
    other.publish(2, tensors_of(1))
    trainer.replicate(wrong, 2, serve=False)
    assert same_bytes(wrong, tensors_of(1))


def test_the_claim_of_an_offer_ends_with_it(no_collector):
    slab = Slab.allocate([spec_of("a", torch.zeros(4))])
    slab.mark_written()
    offer = Offer(ShardKey(1, "checkpoint"), slab.manifest(), slab)
    with pytest.raises(UsageError, match=PUBLISHED):
        claims.claim(slab, "it is reading into", is_written=True)
    del offer
    claims.claim(slab, "it is reading into", is_written=True).end()
