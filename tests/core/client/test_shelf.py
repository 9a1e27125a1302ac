"""What a worker offers, event by event: what happens goes in, the list of what the shell is to do comes out."""

from __future__ import annotations

import pytest

from tensorhub_plugins.core.client.shelf import Announce, GiveWay, MarkReady, Retain, Retract, Shelf, Withdraw
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import Manifest, TensorSpec, TensorTable
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey

RUNTIME = "runtime:f"
ONE, TWO = ShardKey(1, CHECKPOINT), ShardKey(2, CHECKPOINT)


def manifest(tag: bytes = b"1") -> Manifest:
    return Manifest(TensorTable.of([TensorSpec("w", "uint8", (4,), 4)]), tag * 16, 4)


def publish(shelf: Shelf[str], key: ShardKey, offer: str, *, tag: bytes = b"1", returns: bool = False) -> None:
    """Published, and the hub knows."""
    assert shelf.publish(key, manifest(tag), offer, returns=returns, was_read=False) == [Announce(offer, True, False)]
    shelf.announced(key, manifest(tag))


def read(shelf: Shelf[str], key: ShardKey, offer: str, *, is_for_others: bool = False) -> int:
    """Arriving."""
    number = shelf.begin_read(10, is_for_others=is_for_others)
    shelf.grant(number, key)
    assert shelf.prepare(number, key, offer) == [Announce(offer, False, True)]
    return number


# --- publish ---


def test_what_is_published_is_found_until_it_is_unpublished():
    shelf = Shelf[str]()
    publish(shelf, ONE, "a")
    assert (shelf.find(ONE), shelf.find(TWO)) == ("a", None)
    ticket = shelf.unpublish(1)
    assert shelf.find(ONE) == "a"  # until the hub has answered
    assert shelf.unpublished(ticket, keep=False) == [Withdraw(ONE, "a")]
    assert shelf.find(ONE) is None and shelf.unpublish(1) == {}


def test_what_the_hub_refuses_was_not_published():
    shelf = Shelf[str]()
    shelf.publish(ONE, manifest(), "a", returns=False, was_read=False)
    assert shelf.refused(ONE, "a") == [Withdraw(ONE, "a")]
    publish(shelf, ONE, "b", tag=b"2")  # other bytes: there were none before
    assert shelf.refused(ONE, "a") == []  # late: it is another offering's


def test_versions_only_grow_in_a_layout_unless_the_fleet_returns():
    shelf = Shelf[str]()
    publish(shelf, TWO, "b")
    for wrong in (ONE, TWO):
        with pytest.raises(UsageError):
            shelf.check(wrong, returns=False)
        with pytest.raises(UsageError):
            shelf.publish(wrong, manifest(), "x", returns=False, was_read=False)
    assert list(shelf.entries) == [TWO]
    publish(shelf, ShardKey(1, RUNTIME), "r")
    publish(shelf, ONE, "a", returns=True)
    assert shelf.published[CHECKPOINT].version == 1
    shelf.unpublished(shelf.unpublish(1), keep=False)
    with pytest.raises(UsageError, match="with other bytes"):
        shelf.publish(ONE, manifest(b"2"), "c", returns=True, was_read=False)
    publish(shelf, ONE, "c")  # taken back, and here again with the same bytes


# --- unpublish ---


def test_a_version_is_given_up_in_one_layout_or_in_all():
    shelf, runtime = Shelf[str](), ShardKey(1, RUNTIME)
    publish(shelf, ONE, "a")
    publish(shelf, runtime, "r")
    assert list(shelf.unpublish(1, RUNTIME)) == [runtime] and list(shelf.unpublish(1)) == [ONE, runtime]


def test_the_last_copy_is_retained_in_other_memory_until_it_may_be_released():
    shelf = Shelf[str]()
    publish(shelf, ONE, "a")
    assert shelf.unpublished(shelf.unpublish(1), keep=True) == [Retain(ONE, "a")]
    assert not shelf.replace(ONE, "another", "copy") and shelf.find(ONE) == "a"
    assert shelf.replace(ONE, "a", "copy") and shelf.find(ONE) == "copy" and shelf.entries[ONE].is_retained
    assert shelf.may_release([TWO]) == {}
    assert shelf.unpublished(shelf.may_release([ONE, TWO]), keep=False) == [Withdraw(ONE, "copy")]
    assert not shelf.replace(ONE, "copy", "again")  # it has gone while it was copied


def test_an_answer_about_an_earlier_offering_says_nothing_about_the_present_one():
    """Two threads give up the same, and one of them reads it again before the other hears."""
    shelf = Shelf[str]()
    publish(shelf, ONE, "a")
    first, second = shelf.unpublish(1), shelf.unpublish(1)
    assert shelf.unpublished(first, keep=False) == [Withdraw(ONE, "a")]
    shelf.complete(read(shelf, ONE, "b"))
    assert shelf.unpublished(second, keep=False) == [] == shelf.unpublished(second, keep=True)
    assert shelf.find(ONE) == "b"
    assert shelf.unpublished(shelf.unpublish(1), keep=False) == [Withdraw(ONE, "b")]  # the control: now it is meant


def test_a_copy_that_may_be_released_is_not_what_was_published_after_it():
    shelf = Shelf[str]()
    publish(shelf, ONE, "a")
    shelf.unpublished(shelf.unpublish(1), keep=True)
    first, second = shelf.may_release([ONE]), shelf.may_release([ONE])  # the hub says so twice
    assert shelf.still_meant(first) == first
    assert shelf.unpublished(first, keep=False) == [Withdraw(ONE, "a")]
    publish(shelf, ONE, "b")
    assert shelf.still_meant(second) == {} and shelf.still_meant(shelf.unpublish(1)) != {}


# --- what is read is served on ---


def test_what_arrives_is_served_segment_by_segment_and_whole_at_the_end():
    shelf = Shelf[str]()
    number = read(shelf, ONE, "a")
    assert shelf.find(ONE) == "a" and shelf.arriving(number) == ["a"]
    assert shelf.verified(number, ONE, 3) == [MarkReady("a", 3)]
    assert shelf.verified(number, TWO, 3) == []
    with pytest.raises(UsageError, match="still being read"):
        shelf.unpublish(1)
    assert shelf.may_release([ONE]) == {}
    assert shelf.complete(number) == [MarkReady("a", None), Announce("a", True, True)]
    assert shelf.drop(number, restarts_after=None) == []  # it was complete already
    assert shelf.unpublished(shelf.unpublish(1), keep=False) == [Withdraw(ONE, "a")]


def test_what_will_never_be_whole_is_retracted_and_withdrawn():
    shelf = Shelf[str]()
    number = read(shelf, ONE, "a")
    two = ShardKey(1, CHECKPOINT, 1, 2)
    shelf.prepare(number, two, "b")
    assert shelf.drop(number, restarts_after=2) == [Retract((ONE, two)), Withdraw(ONE, "a"), Withdraw(two, "b")]
    runtime = ShardKey(1, RUNTIME)
    assert shelf.prepare(number, runtime, "r") == [Announce("r", False, True)]  # it goes on in another layout
    assert shelf.drop(number, restarts_after=None) == [Retract((runtime,)), Withdraw(runtime, "r")]
    assert shelf.entries == {} and shelf.readings == {}


def test_what_is_here_already_is_not_replaced_by_what_arrives():
    shelf = Shelf[str]()
    publish(shelf, ONE, "a")
    number = shelf.begin_read(1)
    assert shelf.prepare(number, ONE, "b") == [] and shelf.find(ONE) == "a"
    assert shelf.verified(number, ONE, 0) == []
    assert shelf.drop(number, restarts_after=None) == [] and shelf.find(ONE) == "a"


def test_a_shard_is_expected_by_those_that_were_sent_after_the_read_began():
    shelf = Shelf[str]()
    assert not shelf.is_expected(ONE, 10)
    number = shelf.begin_read(created_after=10)
    assert shelf.is_expected(ONE, 10) and not shelf.is_expected(ONE, 9)
    shelf.grant(number, TWO)
    assert shelf.is_expected(TWO, 10) and not shelf.is_expected(ONE, 10)  # it is known by now what is read
    shelf.drop(number, restarts_after=12)
    assert shelf.is_expected(ONE, 10)
    shelf.drop(number, restarts_after=None)
    assert not shelf.is_expected(ONE, 10)


def test_who_was_sent_for_what_was_dropped_does_not_get_what_comes_instead():
    """The hub has ended its lease. It may send this read to it, and each would wait for the other."""
    shelf = Shelf[str]()
    number = shelf.begin_read(created_after=10)
    shelf.prepare(number, ONE, "a")
    shelf.drop(number, restarts_after=12)
    assert not shelf.is_expected(ONE, 11) and shelf.is_expected(ONE, 12)
    assert shelf.is_expected(TWO, 10)  # of which nothing was dropped
    assert shelf.readings[number].since(ONE) == 12


def test_a_closed_shelf_takes_nothing_and_promises_nothing():
    shelf = Shelf[str]()
    publish(shelf, ONE, "a")
    number = read(shelf, TWO, "b")
    assert shelf.close() == [Withdraw(ONE, "a"), Withdraw(TWO, "b")]
    assert shelf.prepare(number, ShardKey(3, CHECKPOINT), "c") == [] and not shelf.is_expected(TWO, 10)
    assert shelf.verified(number, TWO, 0) == [] == shelf.complete(number) and shelf.entries == {}
    with pytest.raises(UsageError, match="closed"):
        publish(shelf, ShardKey(3, CHECKPOINT), "c")
    assert shelf.entries == {}


# --- copies that the hub has asked for ---


@pytest.mark.parametrize("is_arriving", [True, False])
def test_a_copy_for_others_gives_way_to_what_its_owner_publishes(is_arriving: bool):
    shelf = Shelf[str]()
    number = read(shelf, ONE, "copy", is_for_others=True)
    if not is_arriving:
        shelf.complete(number)
        assert shelf.unpublished(shelf.copies(1), keep=True) == [Retain(ONE, "copy")]
    said = shelf.publish(ONE, manifest(), "mine", returns=False, was_read=False)
    assert said == [GiveWay(ONE, "copy", is_arriving), Announce("mine", True, False)]
    assert shelf.copies(1) == {} and shelf.find(ONE) == "mine"
    if is_arriving:  # what still comes is not the owner's
        assert shelf.verified(number, ONE, 1) == [] == shelf.complete(number)
    assert shelf.refused(ONE, "mine") == [Retract((ONE,)), Withdraw(ONE, "mine")]  # the hub had heard of a copy here


def test_what_arrives_for_others_keeps_nobody_from_unpublishing():
    shelf = Shelf[str]()
    number = read(shelf, ONE, "copy", is_for_others=True)
    assert shelf.unpublish(1) == {} == shelf.copies(1)
    shelf.complete(number)
    assert list(shelf.unpublish(1)) == [ONE] == list(shelf.copies(1))
    assert shelf.copies(2) == {}


def test_what_its_owner_reads_meanwhile_is_no_copy_for_others():
    shelf = Shelf[str]()
    asked = shelf.begin_read(10, is_for_others=True)
    shelf.complete(read(shelf, ONE, "mine"))
    shelf.grant(asked, ONE)
    assert shelf.prepare(asked, ONE, "copy") == [] == shelf.complete(asked)
    assert shelf.copies(1) == {} and shelf.find(ONE) == "mine"
