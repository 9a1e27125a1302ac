"""What simulated trainers, rollouts and operators do. `python tests/sim/programs.py SEED` replays a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from checks import checkpoint_content, convert
from reading import Got, Replicate
from workers import FAILED, Group, Meet, Program, Publish, Request, Sleep, Worker
from world import World

from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey, step_of, version_of

RUNTIME = "runtime:5eed"


def trainer(worker: Worker) -> Program:
    world, group = worker.world, worker.group
    rounds_before = group.rounds_before  # a former life still asks when the group has started again
    # A group that starts again resumes from one of its last steps, or from none.
    first = world.rng.choice([0, *range(max(0, world.newest_step - 4), world.newest_step + 1)])
    resumed = world.resumed.setdefault(group.life, first)
    attempt = yield from begin(worker, resumed)
    yield Request(lambda number: m.Retain(number, world.retain_newest, world.retain_domains), 30.0)
    while True:
        yield Sleep(world.rng.uniform(0.2, 4.0))
        met = yield Meet()
        version = version_of(attempt, resumed + met.round - rounds_before)
        if worker.haunts is None:
            world.newest_step = step_of(version)
        held = [key for key in worker.offers if key.version < version]
        key = ShardKey(version, CHECKPOINT, worker.shard, worker.group.shard_count)
        reply = yield Publish(key, checkpoint_content(version, worker.shard))
        while reply is None and (met.calm or world.rng.random() < 0.5):  # once more, or it goes on without that one
            world.counts["publish_expired"] += 1
            reply = yield Publish(key, checkpoint_content(version, worker.shard))
        if superseded(worker, reply):
            return
        world.counts["published"] += reply is not None
        for old in held:
            world.counts["made_ahead"] += worker.deltas.changes.make_ahead(old.version, CHECKPOINT)
        yield from unpublish(worker, held)
        if met.calm:
            world.last_version = version
            worker.finished = True
            return


def begin(worker: Worker, step: int) -> Program:
    """As `Client.begin`, again and again: whoever is refused is started again."""
    world, word = worker.world, f"life {worker.group.life}"
    while True:
        timeout_s = world.rng.choice([5.0, 30.0])
        reply = yield Request(lambda number: m.Begin(number, step, timeout_s, word), timeout_s)  # noqa: B023
        if isinstance(reply, m.Rivals):
            world.counts["rivals"] += 1
            alive = {other.process for other in world.workers.values()}
            gone = tuple(process for process in reply.processes if process not in alive)
            if world.rng.random() < 0.5:  # on another host
                gone = ()
            reply = yield Request(
                lambda number: m.Begin(number, step, timeout_s, word, gone, waits=True),  # noqa: B023
                timeout_s,
            )
        if isinstance(reply, m.Begun):
            world.counts["attempts"] += 1
            world.counts["resumed_lower"] += reply.attempt.number > 0
            return reply.attempt.number
        world.counts["not_begun"] += 1
        yield Sleep(1.0)


def superseded(worker: Worker, reply: m.Reply | None) -> bool:
    """Whether it is told to end, as another attempt counts, perhaps one with its own number: it is started again."""
    is_over = isinstance(reply, m.Refused) and reply.error == "Superseded" and worker.haunts is None
    if is_over:
        worker.world.counts["ended_as_told"] += 1
        worker.group.crash(1.0)
    return is_over


def zombie(worker: Worker) -> Program:
    """A trainer whose former life goes on, as if nothing had happened."""
    world = worker.world
    for _ in range(10):
        yield Sleep(world.rng.uniform(0.2, 6.0))
        last = max((key.version for key in worker.offers), default=version_of(0, 1))
        key = ShardKey(last + 1, CHECKPOINT, worker.shard, worker.group.shard_count)
        reply = yield Publish(key, checkpoint_content(last + 1, worker.shard))
        world.counts["zombie_heard" if isinstance(reply, m.Done) else "zombie_refused"] += reply is not None
        yield from unpublish(worker, [key for key in worker.offers if world.rng.random() < 0.5])
        yield Request(lambda number: m.Retain(number, world.retain_newest, world.retain_domains), 5.0)
    worker.die()


def rollout(worker: Worker) -> Program:
    world, group = worker.world, worker.group
    layouts = (RUNTIME, CHECKPOINT) if group.kind == "runtime" else (CHECKPOINT,)
    current = 0
    while not group.finished:
        timeout_s = world.rng.choice([2.0, 10.0, 30.0])
        reply = yield Request(lambda number: m.Wait(number, 0, current, timeout_s), timeout_s)  # noqa: B023
        if isinstance(reply, m.Visible):
            worker.see(reply.version)
        met = yield Meet()
        if met.version == FAILED:
            worker.finished = world.calm and current == world.last_version
            continue
        if world.rng.random() < 0.3 and len(layouts) == 1:  # direct: the old bytes are overwritten in place
            yield from unpublish(worker, worker.offers)
        claim = len(layouts) > 1
        timeout_s = world.rng.choice([3.0, 10.0, 30.0])
        got = yield Replicate(met.version, 0 if met.version else worker.seen, layouts, claim, timeout_s)
        worker.outcome = got.version if isinstance(got, Got) else FAILED
        if not isinstance(got, Got):
            continue
        group.note(worker.shard, met.round, got.version)
        old = [key for key in worker.offers if key.version < got.version]
        if claim and got.layout == CHECKPOINT:
            yield from convert_and_publish(worker, got)
        yield from unpublish(worker, old)
        current = got.version
        yield Sleep(world.rng.uniform(0.0, 1.0))
        worker.finished = world.calm and current == world.last_version


def follower(worker: Worker) -> Program:
    """It runs what it is told to run, and goes back, too."""
    world = worker.world
    current = 0
    while not worker.group.finished:
        timeout_s = world.rng.choice([2.0, 10.0, 30.0])
        reply = yield Request(lambda number: m.Target(number, current, timeout_s), timeout_s)  # noqa: B023
        if isinstance(reply, m.Visible):
            got = yield Replicate(reply.version, 0, (CHECKPOINT,), False, world.rng.choice([3.0, 10.0]))
            if isinstance(got, Got):
                yield from unpublish(worker, [key for key in worker.offers if key.version != got.version])
                current = got.version
        yield Sleep(world.rng.uniform(0.0, 1.0))
        worker.finished = world.calm and current == world.last_version


def operator(worker: Worker) -> Program:
    """Pins, unpins and withdraws as it likes; in the calm, what is pinned still is let go."""
    world = worker.world
    while not world.calm:
        yield Sleep(world.rng.uniform(0.5, 8.0))
        reply = yield Request(m.AskVersions, 5.0)
        held = [info.version for info in reply.versions if info.visible] if isinstance(reply, m.Versions) else []
        what = world.rng.choice([m.Pin, m.Pin, m.Withdraw])
        version = world.rng.choice(held) if held and (what is m.Withdraw or world.rng.random() < 0.6) else 0
        if not world.calm and (what is m.Pin or version):  # the last version is everybody's goal
            reply = yield Request(lambda number: what(number, version, 10.0), 10.0)  # noqa: B023
            done = "pinned" if version and what is m.Pin else "unpinned" if what is m.Pin else "withdrawn"
            world.counts[done] += isinstance(reply, m.Done)
    worker.finished = True
    while not all(group.finished for group in world.groups):
        yield Sleep(1.0)
        if worker.machine.directive.pin:
            yield Request(lambda number: m.Pin(number, 0, 10.0), 10.0)


def convert_and_publish(worker: Worker, got: Got) -> Program:
    world = worker.world
    world.counts["conversions"] += 1
    yield Sleep(world.rng.uniform(0.0, 1.0))
    key = ShardKey(got.version, RUNTIME, worker.shard, worker.group.shard_count)
    if world.rng.random() < 0.1 and not world.calm:
        world.counts["abandoned"] += 1
        yield Request(lambda number: m.Abandon(number, key), 10.0)
        return
    content = convert([got.shards[i] for i in sorted(got.shards)], worker.shard)
    if key in worker.offers:  # from before, retained
        world.counts["converted_before"] += 1
        yield Request(lambda number: m.Abandon(number, key), 10.0)
    else:
        yield Publish(key, content, was_read=True)
    yield from unpublish(worker, [k for k in worker.offers if k.layout == CHECKPOINT])


def unpublish(worker: Worker, keys: Iterable[ShardKey]) -> Program:
    yield from worker.unpublish(worker.shelf.may_release(keys))


# --- a cluster ---


def cluster(seed: int, **broken: Any) -> World:
    """A world with groups of workers in it. broken: a shelf_class, or verify=False."""
    world = World(seed, **broken)
    rng = world.rng
    world.trainers = Group(world, "trainer", rng.choice([1, 1, 2, 3]), Location("dc", "r0", "h0"), "trainer", trainer)
    world.groups, world.zombie = [world.trainers], zombie
    for i in range(rng.randint(2, 4)):
        kind = rng.choice(["checkpoint", "runtime", "follower"])
        location = Location(rng.choice(["dc", "dc", "far"]), f"r{i % 2}", f"h{i}")
        shards = 1 if kind == "follower" else rng.choice([1, 1, 2])
        program = follower if kind == "follower" else rollout
        spot = rng.random() < 0.3
        world.groups.append(Group(world, f"rollout-{i}", shards, location, kind, program, preemptible=spot))
    if rng.random() < 0.5:
        world.groups.append(Group(world, "operator", 1, Location("dc", "r0", "h0"), "operator", operator))
    return world


def simulate(seed: int, **broken: Any) -> Counter[str]:
    """Run one seed to its end; raise Violation when a rule is broken. broken: as in `cluster`."""
    return cluster(seed, **broken).run()


if __name__ == "__main__":
    import sys

    for argument in sys.argv[1:]:  # the whole talk of one seed: python tests/sim/programs.py 17
        world = cluster(int(argument))
        world.log = print
        print(dict(world.run()))
