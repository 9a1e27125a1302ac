"""The rules under faults, in seeds that show what a thousand do; and that the simulator notices when a rule is broken.

A failure names its seed; `python tests/sim/programs.py SEED` replays it and prints all that hub and workers said.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import broken_hubs
import changing
import choose
import programs
import pytest
import reading
from broken_shelves import (
    DropsWhatItIsToRetain,
    ExpectsNothing,
    ForgetsToRetainElsewhere,
    ForgetsToRetract,
    ForgetsToSayThatAllIsHere,
    ForgetsToWithdraw,
    LeavesWhatIsGivenUp,
    OffersWhatHasNotArrived,
    ServesOnWhatWasDropped,
    ServesRetainedFromTheOldMemory,
)
from checks import Violation
from programs import cluster, simulate
from world import Faults, Lasting, World

from tensorhub_plugins.core.client import session as s
from tensorhub_plugins.core.client.changes import Bases, Sender
from tensorhub_plugins.core.deltas.cache import Deltas
from tensorhub_plugins.core.hub import candidates
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.protocol.lineage import Attempt

SEEDS = int(os.environ.get("TENSORHUB_SIM_SEEDS", str(choose.OF)))  # at most, where fewer show enough
CONTROL_SEEDS = 400  # a broken rule shows within the first few dozen


def outcome(seed: int) -> Counter[str] | str:
    try:
        return simulate(seed)
    except Violation as violation:
        return str(violation)
    except Exception as error:  # a machine's own assertion or crash: as bad, and it needs its seed too
        return f"{type(error).__name__}: {error} (seed {seed})"


def outcomes_of(seeds: Iterable[int]) -> Counter[str]:
    """What has happened in all of them."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # others use the cores
        outcomes = list(map(outcome, seeds))
    else:
        with ProcessPoolExecutor() as pool:
            outcomes = list(pool.map(outcome, seeds, chunksize=10))
    violations = [text for text in outcomes if isinstance(text, str)]
    assert not violations, f"{len(violations)} of {len(outcomes)} seeds:\n" + "\n".join(violations[:10])
    return sum((each for each in outcomes if isinstance(each, Counter)), Counter())


@pytest.mark.slow
@pytest.mark.timeout(max(1200, 2 * SEEDS))
def test_the_rules_hold_under_faults_and_everybody_finishes() -> None:
    happened = {
        "hub_crashes", "worker_crashes", "freezes", "cuts", "corrupt_segments", "lost_sources", "cut_off", "kept",
        "pipelined_segments", "waited_for_pipeline", "conversions", "abandoned", "kept_without_hub", "HubAway",
        "gave_up_DeadlineExceeded", "gave_up_VersionGone", "may_release", "tired", "further_idle", "further_urgent",
        "waited_for_offer", "pinned", "unpinned", "withdrawn", "told_to_stop", "went_back", "haunted", "resumed_lower",
        "zombie_refused", "superseded_copies", "rivals", "not_begun", "held_for_others",
        "hub_freezes", "publish_expired",
        "by_delta", "chains", "deltas_passed_on", "made_ahead", "in_place", "copied_equal", "hint_was_wrong",
        "poisoned", "lost_deltas", "base_was_lost", "delta_was_wrong", "deltas_refused",
    }  # fmt: skip
    first = choose.stored() if "TENSORHUB_SIM_SEEDS" not in os.environ else list(range(SEEDS))
    total = outcomes_of(first)
    if rare := {name for name in happened if total[name] < SEEDS / 50}:
        print(f"the stored seeds do not exercise {rare}: choose others by tests/sim/choose.py")
        total += outcomes_of(seed for seed in range(SEEDS) if seed not in first)
    print(dict(total))
    rare = {name for name in happened if total[name] < SEEDS / 50}
    assert not rare, f"the runs do not exercise {rare}"


def test_seeds_are_chosen_for_what_is_rare() -> None:
    """All of what is rare, then the first ones."""
    shown = {seed: Counter(often=5, rare=seed in (7, 900), rarer=40 * (seed == 950)) for seed in range(choose.OF)}
    chosen = choose.choose(shown)
    assert len(chosen) == choose.COUNT and {7, 900, 950} < set(chosen) and set(range(240)) < set(chosen)
    assert len(set(choose.stored())) == choose.COUNT


def test_a_seed_is_the_same_run_every_time() -> None:
    def trace(seed: int) -> bytes:
        world = cluster(seed)
        world.run()
        return world.trace.digest()

    assert [trace(seed) for seed in range(3)] == [trace(seed) for seed in range(3)]
    assert trace(1) != trace(2)


@pytest.mark.slow
def test_without_faults_no_source_is_lost_and_nobody_gives_up() -> None:
    """Nor operators: they withdraw what is being read, and pin what only engines of another kind hold."""
    for seed in range(10):
        world = cluster(seed)
        world.faults = Faults()
        world.groups = [group for group in world.groups if group.kind != "operator"]
        total = world.run()
        assert total["replications"] and not total["lost_sources"] - total["cut_off"]
        assert not [name for name in total if name.startswith("gave_up")], total


@pytest.mark.parametrize("notices", [True, False], ids=["it notices", "the control"])
def test_a_hub_that_is_stopped_at_its_start_decides_nothing_when_it_wakes(
    notices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer starts again meanwhile: it is the first that the hub knows."""
    world = cluster(3)
    world.faults, world.lasting = Faults(), Lasting(hub_freeze_s=(18.0,), hub_down_s=(1.0,))
    for action in (world._freeze_hub, world._crash_hub, lambda: world.trainers.crash(0.5)):
        world.at(10.0, action)
    if notices:
        assert world.run()["attempts"] > len(world.trainers.workers)
        return
    monkeypatch.setattr(Registry, "was_deaf", lambda *_: 0.0)
    with pytest.raises(Violation, match="hasty"):
        world.run()


@pytest.mark.parametrize("starts_again", [True, False], ids=["it starts again", "the control"])
def test_a_trainer_that_is_told_to_end_starts_again(starts_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout was silent when the trainer began, and knows of another attempt of that number, whose mark counts."""
    world = cluster(3)
    world.faults, rival = Faults(), Directive(attempts=(Attempt(0, 0, b"\xff" * 16),))
    world.at(10.0, lambda: next(iter(world.groups[1].workers)).feed(s.Heard(m.Alive(directive=rival))))
    if starts_again:
        assert world.run()["ended_as_told"] == 1
        return
    monkeypatch.setattr(programs, "superseded", lambda worker, reply: False)
    with pytest.raises(Violation, match="stuck"):
        world.run()


def losses_without_faults(seed: int, **broken: Any) -> int:
    """Nor operators: who has heard first that a version is withdrawn passes it on no more."""
    world = cluster(seed, **broken)
    world.faults = Faults()
    world.groups = [group for group in world.groups if group.kind != "operator"]
    total = world.run()
    return total["lost_sources"] - total["cut_off"]


@pytest.mark.slow
def test_a_shelf_that_expects_nothing_turns_away_who_was_sent_to_it() -> None:
    """The control of what the hub relies on when it lends a shard to many at once, of which most have nothing yet."""
    seeds = range(10)
    assert sum(losses_without_faults(seed, shelf_class=ExpectsNothing) for seed in seeds) > 10
    assert not sum(losses_without_faults(seed) for seed in seeds)


def crossings(seeds: range) -> tuple[int, int]:
    """(segments read from another data centre, different ones among them) in runs without faults."""
    times = different = 0
    for seed in seeds:
        world = cluster(seed)
        world.faults = Faults()
        world.run()
        times += world.crossed.total()
        different += len(world.crossed)
    return times, different


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_copy_crosses_a_long_way_and_the_others_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not exactly one: who comes when all near it have gone on to the next version reads from afar again."""
    times, different = crossings(range(24))
    assert different > 100 and times <= 1.05 * different
    everywhere: list[tuple[bool, list[tuple[tuple[str, ...], float]]]] = [(False, [(("all",), 0.0)])]
    monkeypatch.setattr(candidates, "_search_order", lambda reader: everywhere)  # the control: near and far are alike
    careless, _ = crossings(range(24))
    assert careless > 1.5 * times


# --- negative controls: a rule is broken on purpose, and it must be that rule that is reported ---

# The seeds in which some were last reported. They come first; then all, as what happens in a seed changes.
LAST_SEEN = {
    "asks_for_deltas_for_ever": 11,
    "asks_nobody_for_a_copy": 8,
    "believes_late_words": 127,
    "counts_spot_nodes": 33,
    "hears_zombies": 315,
    "reads_on_for_ever": 1,
    "shows_what_is_superseded": 92,
}


def control_seeds(broken: Any) -> list[int]:
    return [LAST_SEEN.get(broken.__name__, 0), *range(CONTROL_SEEDS)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("lease", broken_hubs.forgets_leases),
        ("retained", broken_hubs.drops_last_copies),
        ("circle", broken_hubs.lets_readers_wait_in_circles),
        ("atomic", broken_hubs.shows_half_versions),
        ("group", broken_hubs.resolves_latest_for_each_shard),
        ("backwards", broken_hubs.goes_back),
        ("stuck", broken_hubs.never_tells_of_new_versions),
        ("ghost", broken_hubs.believes_late_words),
        ("pinned", broken_hubs.follows_the_newest_though_another_is_pinned),
        ("withdrawn forgotten", broken_hubs.lends_what_is_withdrawn),
        ("superseded", broken_hubs.shows_what_is_superseded),
        ("zombie", broken_hubs.hears_zombies),
        ("raised", broken_hubs.hears_what_was_given_up),
        ("numbers", broken_hubs.numbers_every_attempt_alike),
        ("domains", broken_hubs.asks_nobody_for_a_copy),
        ("domains", broken_hubs.counts_spot_nodes),
        ("pinned forgotten", broken_hubs.does_not_listen_to_directives),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_rule_of_the_hub_is_caught(rule: str, broken: broken_hubs.Broken) -> None:
    for seed in control_seeds(broken):
        with broken():
            found = violation(seed)
        if found is not None:
            assert found.rule in rule.split(), found
            return
    pytest.fail(f"{CONTROL_SEEDS} seeds with a broken rule, and nobody noticed")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        # For the hub these two hold nothing, and may read who reads from them.
        ("served circle", ForgetsToWithdraw),
        ("served circle", ServesOnWhatWasDropped),
        ("served", OffersWhatHasNotArrived),
        ("served", ForgetsToRetainElsewhere),
        ("served ghost", ServesRetainedFromTheOldMemory),
        ("retained ghost", DropsWhatItIsToRetain),
        ("ghost", LeavesWhatIsGivenUp),
        ("ghost", ForgetsToRetract),
        ("ghost", ForgetsToSayThatAllIsHere),
    ],
)
def test_a_broken_rule_of_the_shelf_is_caught(rule: str, broken: type[Any]) -> None:
    found = next(filter(None, (violation(seed, shelf_class=broken) for seed in range(CONTROL_SEEDS))))
    assert found.rule in rule.split(), found


def test_a_reader_that_does_not_verify_is_caught() -> None:
    found = next(filter(None, (violation(seed, verify=False) for seed in range(CONTROL_SEEDS))))
    assert found.rule == "torn", found


# --- of deltas ---


def believes_what_memory_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(changing, "is_here", lambda data, digest: True)


def keeps_every_delta(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deltas, "fit", lambda self, size_bytes: setattr(self, "_size_bytes_max", 1 << 30))


def reads_on_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reading.Offer, "detach", lambda self, reader: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("torn served", believes_what_memory_held),
        ("kept", keeps_every_delta),
        ("kept", reads_on_for_ever),
    ],
)
def test_a_broken_rule_of_deltas_is_caught(
    rule: str, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    found = next(filter(None, map(violation, control_seeds(broken))))
    assert found.rule in rule.split(), found


def asks_for_deltas_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A reader asks again for a delta that was wrong, and the source sends the same one."""
    patch.setattr(Sender, "refuse", lambda *_: None)
    patch.setattr(changing.Patches, "knows_as_wrong", lambda *_: False)
    patch.setattr(Bases, "patched", lambda *_: None)  # which counts them


@pytest.mark.parametrize("asks_whole", [True, False], ids=["it asks for all of it", "the control"])
def test_where_no_delta_is_ever_right_everybody_finishes(asks_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the two ends knew different codecs."""
    monkeypatch.setattr(Bases, "patch", lambda *_: None)
    if asks_whole:
        total = simulate(1)
        assert total["delta_was_wrong"] and not total["by_delta"]
        return
    asks_for_deltas_for_ever(monkeypatch)
    found = next(filter(None, map(violation, control_seeds(asks_for_deltas_for_ever))))
    assert found.rule == "stuck", found


def offers_after(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[World, list[reading.Offer]]:
    """Return a world at its end, and the offers of all its workers that are still in memory."""
    made: weakref.WeakSet[reading.Offer] = weakref.WeakSet()
    original = reading.Offer.__init__

    def init(self: reading.Offer, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        made.add(self)

    world = cluster(seed)
    with monkeypatch.context() as patch:
        patch.setattr(reading.Offer, "__init__", init)
        world.run()
    world._queue.clear()  # what was to be done later
    gc.collect()
    return world, list(made)


@pytest.mark.parametrize("is_weak", [True, False], ids=["as it is", "the control"])
def test_deltas_keep_no_version_alive(is_weak: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders, bases and caches: what is offered no more is gone."""
    kept: list[object] = []
    if not is_weak:
        original = Sender.__init__
        monkeypatch.setattr(Sender, "__init__", lambda self, *given: kept.append(given) or original(self, *given))
    world, left = offers_after(0, monkeypatch)
    offered = {offer for worker in world.workers.values() for offer in worker.offers.values()}
    assert offered and (set(left) == offered) == is_weak


def violation(seed: int, **broken: Any) -> Violation | None:
    try:
        simulate(seed, **broken)
    except Violation as found:
        return found
    except AssertionError:
        pass  # a broken hub's own books may be wrong before anybody is told so: another seed shows the rule
    return None
