"""The rules under faults, 1,000 seeds; and that the simulator would notice if a rule were broken.

A failure names its seed; `python tests/sim/simulator.py SEED` replays it and prints all that hub and workers said.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec
import pytest
from broken_hubs import DropsLastCopies, ForgetsLeases
from simulator import Faults, Violation, World, simulate

from tensorhub_plugins.core.hub import selection as placement
from tensorhub_plugins.core.hub.hub import Hub
from tensorhub_plugins.core.protocol import messages as m

SEEDS = int(os.environ.get("TENSORHUB_SIM_SEEDS", "1000"))
CONTROL_SEEDS = 400  # a broken rule shows within the first few dozen


def outcome(seed: int) -> Counter[str] | str:
    try:
        return simulate(seed)
    except Violation as violation:
        return str(violation)
    except Exception as error:  # a machine's own assertion or crash: as bad, and it needs its seed too
        return f"{type(error).__name__}: {error} (seed {seed})"


@pytest.mark.timeout(1200)
def test_the_rules_hold_under_faults_and_everybody_finishes() -> None:
    with ProcessPoolExecutor() as pool:
        outcomes = list(pool.map(outcome, range(SEEDS), chunksize=10))
    violations = [text for text in outcomes if isinstance(text, str)]
    assert not violations, f"{len(violations)} of {SEEDS} seeds:\n" + "\n".join(violations[:10])

    total: Counter[str] = sum((each for each in outcomes if isinstance(each, Counter)), Counter())
    print(dict(total))
    happened = {
        "hub_crashes", "worker_crashes", "freezes", "cuts", "corrupt_segments", "lost_sources", "cut_off", "kept",
        "pipelined_segments", "waited_for_pipeline", "conversions", "abandoned", "kept_without_hub", "HubAway",
        "gave_up_DeadlineExceeded", "gave_up_VersionGone", "may_drop", "tired", "further_idle", "further_urgent",
        "waited_for_offer", "pinned", "unpinned", "withdrawn", "told_to_stop", "went_back",
    }  # fmt: skip
    rare = {name for name in happened if total[name] < SEEDS / 50}
    assert not rare, f"the runs do not exercise {rare}"


def test_a_seed_is_the_same_run_every_time() -> None:
    def trace(seed: int) -> bytes:
        world = World(seed)
        world.run()
        return world.trace.digest()

    assert [trace(seed) for seed in range(3)] == [trace(seed) for seed in range(3)]
    assert trace(1) != trace(2)


def test_without_faults_no_source_is_lost_and_nobody_gives_up() -> None:
    """Nor operators: they withdraw what is being read, and pin what only engines of another kind hold."""
    for seed in range(10):
        world = World(seed)
        world.faults = Faults()
        world.groups = [group for group in world.groups if group.kind != "operator"]
        total = world.run()
        assert total["replications"] and not total["lost_sources"] - total["cut_off"]
        assert not [name for name in total if name.startswith("gave_up")], total


def crossings(seeds: range) -> tuple[int, int]:
    """(segments read from another data centre, different ones among them) in runs without faults."""
    times = different = 0
    for seed in seeds:
        world = World(seed)
        world.faults = Faults()
        world.run()
        times += world.crossed.total()
        different += len(world.crossed)
    return times, different


def test_one_copy_crosses_a_long_way_and_the_others_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not exactly one: who comes when all near it have gone on to the next version reads from afar again."""
    times, different = crossings(range(24))
    assert different > 100 and times <= 1.05 * different
    everywhere: list[tuple[bool, list[tuple[tuple[str, ...], float]]]] = [(False, [(("all",), 0.0)])]
    monkeypatch.setattr(placement, "_circles", lambda reader: everywhere)  # the control: near and far are alike
    careless, _ = crossings(range(24))
    assert careless > 1.5 * times


# --- negative controls: a rule is broken on purpose, and it must be that rule that is reported ---


class LetsReadersWaitInCircles(Hub):
    def _reads_from(self, *workers: Any) -> bool:
        return False


class ShowsHalfVersions(Hub):
    def _replica_is_whole(self, *holding: Any) -> bool:
        return True


class ResolvesLatestForEachShard(Hub):
    def _resolve_latest(self, pending: Any, acquire: Any, now: float) -> int:
        return self._newest(pending.worker.history, max(acquire.at_least, pending.worker.seen_version)) or 0


class GoesBack(Hub):
    asked = 0

    def _newest(self, history: Any, at_least: int, *without: Any) -> int | None:
        self.asked += 1
        visible = sorted(n for n, v in history.versions.items() if v.visible)
        return None if not visible else visible[0] if self.asked % 7 == 0 else visible[-1]


class NeverTellsOfNewVersions(Hub):
    def _try_wait(self, *pending: Any) -> None:
        return None

    def _try_acquire(self, *pending: Any) -> None:
        return None


class FollowsTheNewestThoughAnotherIsPinned(Hub):
    def _latest(self, history: Any, at_least: int) -> int | None:
        return self._newest(history, at_least)


class LendsWhatIsWithdrawn(Hub):
    def _direct(self, history: Any, directive: m.Directive, **welcomed: Any) -> None:
        super()._direct(history, m.Directive(directive.serial, directive.pin), **welcomed)


class DoesNotListenToDirectives(Hub):
    def _hello(self, session: bytes, hello: m.Hello, *more: Any) -> None:
        super()._hello(session, msgspec.structs.replace(hello, directive=m.NO_DIRECTIVE), *more)


class BelievesLateWords(Hub):
    def _agrees(self, *heartbeat: Any) -> bool:
        return True

    def _forget_what_is_not_in(self, *hello: Any) -> None:
        pass

    def _publish(self, worker: Any, request: int, holding: Any) -> None:
        worker.withdrawn.clear()
        super()._publish(worker, request, holding)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("lease", {"hub_class": ForgetsLeases}),
        ("retained", {"hub_class": DropsLastCopies}),
        ("circle", {"hub_class": LetsReadersWaitInCircles}),
        ("atomic", {"hub_class": ShowsHalfVersions}),
        ("group", {"hub_class": ResolvesLatestForEachShard}),
        ("backwards", {"hub_class": GoesBack}),
        ("stuck", {"hub_class": NeverTellsOfNewVersions}),
        ("ghost", {"hub_class": BelievesLateWords}),
        ("pinned", {"hub_class": FollowsTheNewestThoughAnotherIsPinned}),
        ("withdrawn", {"hub_class": LendsWhatIsWithdrawn}),
        ("pinned forgotten", {"hub_class": DoesNotListenToDirectives}),
        ("torn", {"verify": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_rule_is_caught(rule: str, broken: dict[str, Any]) -> None:
    for seed in range(CONTROL_SEEDS):
        try:
            simulate(seed, **broken)
        except Violation as violation:
            assert violation.rule in rule.split(), violation
            return
    pytest.fail(f"{CONTROL_SEEDS} seeds with a broken rule, and nobody noticed")
