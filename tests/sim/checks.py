"""What must hold in a simulated cluster, and what the bytes of a version are.

The run has two phases: faults, then calm, in which everybody must reach the last version and the hub must end up
knowing exactly what is true. In both, these are checked whenever they could break (`Violation` names the seed):

    torn        what a finished read hands over is, byte for byte, what was published under that name
    group       the shards of a replica that read "latest" together get one version
    backwards   no reader is given an older version, by attempt and step, than before, unless an operator said so or
                that one was superseded
    superseded  no version is lent, named or handed over by who knows it to be superseded
    zombie      who belongs to an attempt that the hub knows to be over changes nothing
    hasty       no attempt is begun by a hub that has not listened for its grace
    numbers     no attempt is given the number of another one that the hub knows of, or has been told of
    withdrawn   no version is lent or named that the hub has been told is bad
    pinned      "latest" is the pinned version as long as the hub has been told of a pin
    atomic      a version is visible only if one replica really held all of it
    retained    no unpublish drops the last copy of a retained version
    domains     in the calm, a retained version is on as many hosts as are wanted, as far as there are safe ones
    served      what an offer that stands has to give are the published bytes
    lease       no byte is read without a lease at the hub, and no unpublish is confirmed while somebody it does not
                name is reading
    circle      nobody waits for bytes that depend on his own
    late        every operation ends by its deadline
    raised      what was given up, and has raised, is not carried out later, and what it published is not here again
    twice       no segment that has arrived intact is read again
    stuck       in the calm, everybody finishes
    ghost       in the calm, the hub's holdings, leases and waiters are the workers' own
    forgotten   in the calm, all know the same of what operators have decided
    kept        in the calm, nobody has more deltas than it may, or is still at work on one
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import xxhash

from tensorhub_plugins.core.hub import hub as hub_machine
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.manifest import Manifest, TensorSpec, TensorTable
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import Directive, merge
from tensorhub_plugins.core.protocol.lineage import Attempt, is_superseded, merged
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey, attempt_of, domain, step_of

if TYPE_CHECKING:
    from workers import Link, Worker
    from world import World

ID_SIZE_BYTES = 8
SEGMENT_SIZE_BYTES = 64
SEGMENTS = 5
ERA = 8  # steps, after which all bytes are others
OVERWRITTEN = b"overwritten".ljust(SEGMENT_SIZE_BYTES)


class Violation(AssertionError):
    def __init__(self, rule: str, world: World, text: str) -> None:
        super().__init__(f"{rule}: {text} (seed {world.seed}, at {world.now:.3f} s)")
        self.rule = rule


# --- what the bytes of a version are ---


def some_bytes(*what: object, size_bytes: int = ID_SIZE_BYTES) -> bytes:
    return hashlib.blake2b(repr(what).encode(), digest_size=size_bytes).digest()


def _segment(era: object, what: object, shard: int, k: int) -> bytes:
    """Return bytes that are the same in an era, but for two of them: so that a delta is worth it."""
    data = bytearray(some_bytes(era, shard, k, size_bytes=SEGMENT_SIZE_BYTES))
    data[k], data[k + SEGMENT_SIZE_BYTES // 2] = some_bytes(what, shard, k, size_bytes=2)
    return bytes(data)


@lru_cache(maxsize=4096)
def checkpoint_content(version: int, shard: int) -> tuple[bytes, ...]:
    """Return the bytes of a version. Its last segment is the one of every other version, too."""
    step = step_of(version)
    changed = ("checkpoint", attempt_of(version), step)
    return tuple(
        _segment(("checkpoint", step // ERA), (*changed[:2], step // 2) if k == SEGMENTS - 1 else changed, shard, k)
        for k in range(SEGMENTS)
    )


def convert(checkpoint: Iterable[tuple[bytes, ...]], shard: int) -> tuple[bytes, ...]:
    """The runtime layout of one shard from all shards of the checkpoint: a torn byte in, a torn shard out."""
    whole = b"".join(segment for content in checkpoint for segment in content)
    return tuple(_segment("runtime", whole, shard, k) for k in range(SEGMENTS))


@lru_cache(maxsize=4096)
def truth(key: ShardKey, trainer_shards: int) -> tuple[bytes, ...]:
    if key.layout == CHECKPOINT:
        return checkpoint_content(key.version, key.shard)
    return convert([checkpoint_content(key.version, i) for i in range(trainer_shards)], key.shard)


@lru_cache(maxsize=4096)
def manifest_of(content: tuple[bytes, ...]) -> Manifest:
    spec = TensorSpec("w", "uint8", (SEGMENTS * SEGMENT_SIZE_BYTES,), SEGMENTS * SEGMENT_SIZE_BYTES)
    return Manifest(TensorTable.of((spec,)), b"".join(xxhash.xxh3_128_digest(c) for c in content), SEGMENT_SIZE_BYTES)


@lru_cache(maxsize=4096)
def root_of(content: tuple[bytes, ...]) -> bytes:
    return manifest_of(content).root()


# --- what the hub says, and what readers do ---


def _check_directed(world: World, session: bytes, reply: m.HubMessage) -> None:
    """What the hub decides agrees with what operators have decided."""
    if not isinstance(reply, m.Done | m.Granted | m.Visible | m.Begun | m.Unpublished | m.Welcome):
        return
    asked, old = world.asked.get((session, reply.request_id)), world.directive
    _check_zombie(world, session, reply.request_id)
    match reply, asked:
        case m.Begun(_, attempt), _:
            if world.now < world.hub_listens_from + HubLimits().grace_s - 0.01:
                raise Violation("hasty", world, f"attempt {attempt.number} is begun, and others may have one to name")
            _check_number(world, attempt)
            world.directive = merge(old, Directive(old.serial, old.pin, (), (attempt,)))
            world.attempts = merged(world.attempts, (attempt,))
        case m.Done(), m.Retain():
            world.told_to_retain = True
        case m.Welcome(), m.Hello() if asked.retain_newest is not None:
            world.told_to_retain |= b"" in (asked.mark, old.mark) or asked.mark == old.mark
        case m.Done(), m.Pin(_, version):
            world.ever_pinned.add(version)
            serial = old.serial + bool(version or old.pin)
            world.directive = msgspec.structs.replace(old, serial=serial, pin=version)
        case m.Done(), m.Withdraw(_, version):
            world.ever_withdrawn.add(version)
            known = version in old.withdrawn
            new = merge(old, Directive(0, 0, (version,)))
            world.directive = msgspec.structs.replace(new, serial=old.serial + (not known))
        case ((m.Granted() | m.Visible()), _):
            version = reply.version
            if version in old.withdrawn:
                raise Violation("withdrawn", world, f"version {version} is named, and was withdrawn")
            if is_superseded(version, old.attempts):
                raise Violation("superseded", world, f"version {version} is named, and is superseded")
            if isinstance(asked, m.Wait | m.Target) and old.pin and version != old.pin:
                raise Violation("pinned", world, f"version {version} is named, and {old.pin} is pinned")
            returns = version == old.pin or old.is_over(getattr(asked, "installed", 0))
            if isinstance(asked, m.Target) and version < asked.installed and not returns:
                raise Violation("backwards", world, f"{asked} is answered with version {version}")


def _check_number(world: World, attempt: Attempt) -> None:
    """A number is given twice only when nobody who has heard of the first has spoken: then nobody can tell their
    versions apart, and who comes back with the other past is to be started again (docs/guarantees.md)."""
    assert world.hub is not None
    marks = world.begun.setdefault(attempt.number, set())
    is_second = bool(marks) and attempt.mark not in marks
    marks.add(attempt.mark)
    if not is_second:
        return
    world.counts["numbered_twice"] += 1
    known, hub = world.hub.registry.workers, world.hub.session
    for worker in (worker for session, worker in world.workers.items() if session in known):
        here = [each for each in worker.machine.directive.attempts if each.mark[:8] == hub[:8] and each != attempt]
        said = (*known[worker.session].hello.directive.attempts, *here)  # to the hub, or by it
        if any(each.number >= attempt.number for each in said):
            raise Violation("numbers", world, f"attempt {attempt.number} is begun anew, and {worker.name} knows of one")
    for group in {worker.group: None for session, worker in world.workers.items() if session not in known}:
        lost = [w for w in group.workers if any(a.number >= attempt.number for a in w.machine.directive.attempts)]
        if group is not world.trainers and any(w.session not in known for w in lost):
            group.crash(1.0)
    for worker in list(world.workers.values()):
        if worker.haunts is not None and worker.session not in known:
            worker.die()


def _check_zombie(world: World, session: bytes, request_id: int) -> None:
    """What is carried out was not asked by who belonged to a former attempt by then."""
    asked, worker = world.asked.get((session, request_id)), world.workers.get(session)
    knew = world.asked_under.get((world.lives, session, request_id), b"")
    gone = isinstance(asked, m.Unpublish) and asked.gone
    read = isinstance(asked, m.Publish) and asked.holding.origin == "replicated"
    changes = isinstance(asked, m.Publish | m.Unpublish | m.Retain | m.Pin | m.Withdraw) and not gone and not read
    if changes and worker is not None and knew not in (b"", worker.machine.mark) and worker.machine.mark:
        raise Violation("zombie", world, f"{worker.name} of a former attempt has changed something: {asked}")


def check_reply(world: World, effect: hub_machine.Send) -> None:
    # What it says again was decided before. A refusal that was lost on the way may be followed by another answer.
    answer = (world.lives, effect.session, getattr(effect.message, "request_id", 0), type(effect.message))
    repeated = answer in world.answered
    world.answered.add(answer)
    reader = world.workers.get(effect.session)
    if reader is not None and isinstance(effect.message, m.Granted) and effect.message.generation:
        reader.lent = max(reader.lent, effect.message.version)
    if not repeated:
        check_not_carried_out_later(world, effect.session, effect.message)
        _check_directed(world, effect.session, effect.message)
    if not isinstance(effect.message, m.Unpublished) or effect.message.must_retain:
        return
    keys = world.unpublishing.get((effect.session, effect.message.request_id), ())
    for key in keys:
        cut = world.cut_off.setdefault((effect.session, key), {})
        cut.update({name: cut.get(name, world.now) if repeated else world.now for name in effect.message.cut_off})
    source = world.workers.get(effect.session)
    asked = source.machine.asked.get(effect.message.request_id) if source else None
    if asked is None or not isinstance(asked.message, m.Unpublish):
        world.given_up |= {(effect.session, key) for key in keys}  # it waits no more, and the hub has decided
        return
    for key in keys:
        offer = source.shelf.find(key)
        given_up = (effect.session, key) in world.given_up
        if not repeated and not asked.message.gone and offer is not None and offer.complete and not given_up:
            _check_retained(world, source, key)
        world.given_up.add((effect.session, key))
    for link in world.links:
        # Another unpublish of the same shard may have ended before, and named it, though nobody waits for it now.
        named = link.reader.name in world.cut_off.get((effect.session, link.key), ())
        if link.source is source and link.key in asked.message.keys and not named:
            _check_lease(world, link, f"unpublish of {link.key} was confirmed to {source.name}")


def _check_lease(world: World, link: Link, what: str) -> None:
    """The hub must know of this read, unless it could not: it was down, or its word or the reader's was lost."""
    hub = world.hub
    if hub is None or hub.registry.recovering(world.hub_now) or world.now >= link.lease_deadline:
        return
    reader = hub.registry.workers.get(link.reader.session)
    if reader is None or link.source.session not in hub.registry.workers:
        return
    if world.last_word[link.reader.session] < link.began:
        return  # its grant may have been overtaken on the way by what ended it; its next heartbeat tells the hub
    returned = world.returned.get(link.source.session, 0.0)
    if link.began < returned and world.last_hello[link.reader.session] < returned:
        return  # it had given up the source meanwhile, and its leases with it; the reader's next Hello tells of them
    cut = world.cut_off.get((link.source.session, link.key), {}).get(link.reader.name, 0.0)
    if link.began < cut and world.last_hello[link.reader.session] < cut:
        return  # an Unpublish came late: its source had given up on it, and keeps the shard; the same Hello tells
    lease = reader.leases.get(link.request)
    if lease is None or lease.sources.get(link.key.shard) != link.source.session:
        raise Violation("lease", world, f"{what} while {link.reader.name} reads without a lease")


def check_not_carried_out_later(world: World, session: bytes, reply: m.HubMessage) -> None:
    """The hub answers that it has done something now: nobody was told before that it had failed."""
    asked = world.asked.get((session, getattr(reply, "request_id", 0)))
    if not isinstance(asked, m.Dated) or isinstance(reply, m.Refused) or getattr(reply, "must_retain", False):
        return
    is_released = isinstance(asked, m.Acquire) and isinstance(reply, m.Done)  # so that it does not begin again
    if asked.request_id in world.raised.get(session, ()) and not is_released:
        raise Violation("raised", world, f"{asked} was given up: {reply}")


def held_by(world: World, event: hub_machine.Event) -> set[ShardKey]:
    """What the worker that speaks holds, as the hub knows it."""
    if world.hub is None or not isinstance(event, hub_machine.Received):
        return set()
    known = world.hub.registry.workers.get(event.session)
    return set() if known is None else set(known.holdings)


def check_not_held_later(world: World, event: hub_machine.Event, before: set[ShardKey]) -> None:
    """By whatever message: a Hello announces shards, too."""
    if isinstance(event, hub_machine.Received) and event.session in world.raised:
        given_up = set(world.raised[event.session].values()) - {None}
        for key in (held_by(world, event) - before) & given_up:
            raise Violation("raised", world, f"the publish of {key} was given up, and it is here: {event.message}")


def check_read(world: World, link: Link) -> None:
    source = world.hub.registry.workers.get(link.source.session) if world.hub is not None else None
    if source is not None and link.key in source.holdings:
        # Else the unpublish has reached its deadline, and the source is about to be told whom to cut off.
        _check_lease(world, link, f"{link.key} is read from {link.source.name}")
    if link.offer is not None and link.offer.complete:
        return  # it waits for nobody
    waits_for: dict[bytes, set[bytes]] = {}
    for each in world.links:
        offer = each.source.shelf.find(each.key)
        # A reader whose deadline has passed gives up as soon as it wakes: what it asked for is nothing to wait for.
        if offer is not None and not offer.complete and world.now < each.lease_deadline:
            waits_for.setdefault(each.reader.session, set()).add(each.source.session)
    todo, seen = [link.source.session], set()
    while todo:
        session = todo.pop()
        if session == link.reader.session and link.reader.session in waits_for:
            raise Violation("circle", world, f"{link.reader.name} waits for itself through {link.source.name}")
        if session not in seen:
            seen.add(session)
            todo.extend(waits_for.get(session, ()))


def _check_retained(world: World, worker: Worker, key: ShardKey) -> None:
    """The hub has just allowed worker to drop this complete copy: was it the last of a retained version?"""
    assert world.hub is not None
    # How many are retained is known to the hub while one lives who has asked for it. A trainer that starts again says
    # so when its attempt has begun: a hub that was started before that has not heard it from anybody.
    asker = world.told_to_retain and any(w.session in world.hub.registry.workers for w in world.trainers.workers)
    count = world.retain_newest if asker else min(1, world.retain_newest)
    good = {version for version in world.ever_visible if not world.directive.is_over(version)}
    # What was given up as too old before is not retained when a newer one is withdrawn or superseded.
    if world.ever_withdrawn or any(attempt.number for attempt in world.attempts):
        good &= world.visible_before
    retained = sorted(good, reverse=True)[:count]
    if world.directive.pin in world.visible_before:
        retained.append(world.directive.pin)
    if key.version not in retained or key.layout != CHECKPOINT:
        return
    others = [other for other in world.workers.values() if other is not worker]
    held = {k for other in others for k, offer in other.offers.items() if offer.complete}
    # A holder that died is believed alive for a while; what dies is not lost by an unpublish. Nor is what its publisher
    # has given up, and was told to nobody: until the hub hears of it, it believes that to be there.
    recently = world.now - world.deaf_s - world.hub.limits.session_timeout_s - 6.0  # its last words may be that late
    buried = {k for session, keys in world.graves.items() if world.dead[session] > recently for k in keys}
    for session, other in world.hub.registry.workers.items():
        buried |= {k for k in world.raised.get(session, {}).values() if k in other.holdings}
    rest = {ShardKey(key.version, key.layout, shard, key.shard_count) for shard in range(key.shard_count)} - {key}
    rest -= {k for k, offer in worker.offers.items() if offer.complete}
    known = {k for other in world.hub.registry.workers.values() for k, h in other.holdings.items() if h.complete}
    if key not in held | buried and rest <= held & known:  # without the rest, the hub thinks it lost already
        raise Violation("retained", world, f"{worker.name} was allowed to drop the last copy of {key}")


def check_no_ghosts(world: World) -> None:
    assert world.hub is not None
    for session, known in world.hub.registry.workers.items():
        worker = world.workers.get(session)
        if worker is None:
            raise Violation("ghost", world, f"the hub still knows {known.name}, which is dead")
        true = {key: offer.complete for key, offer in worker.offers.items() if not offer.withdrawn}
        if {key: h.complete for key, h in known.holdings.items()} != true:
            said, real = sorted(map(str, known.holdings)), sorted(map(str, true))
            raise Violation("ghost", world, f"{known.name} holds {real}, the hub believes {said}")
        if known.leases or known.readers:
            raise Violation("ghost", world, f"{known.name} has leases though nobody reads")
        asked = [p.message for p in known.pending.values() if not isinstance(p.message, m.Wait | m.Target)]
        # A copy for others may wait until its time is over: for a shard that its worker has published itself meanwhile.
        if waits := [x for x in asked if not (getattr(x, "for_others", False) and x.request_id in worker.waiting)]:
            raise Violation("ghost", world, f"{known.name} waits, says the hub: {waits}")
    if len(world.hub.registry.workers) != len(world.workers):
        raise Violation("ghost", world, "the hub has forgotten a worker that lives")


def missing_domains(world: World) -> list[tuple[int, int, int]]:
    """Retained versions that are on too few hosts: the version, on how many it is safe, and on how many it can be."""
    assert world.hub is not None
    history = world.hub.registry.histories["run", "actor"]
    across, safe = history.retain_across, [w for w in world.workers.values() if not w.group.preemptible]
    possible = min(history.retain_domains, len({domain(worker.group.location, across) for worker in safe}))
    found = []
    for version in sorted(history.retained()) if possible > 1 else ():
        hosts: dict[ShardKey, set[tuple[str, ...]]] = {}
        for worker in world.workers.values():
            for key, offer in worker.offers.items():
                if (key.version, key.layout) == (version, CHECKPOINT) and offer.complete:
                    place = domain(worker.group.location, across)
                    hosts.setdefault(key, set()).update([place] if worker in safe else [])
        whole = len(hosts) == world.trainers.shard_count
        if whole and min(map(len, hosts.values())) < possible:
            found.append((version, min(map(len, hosts.values())), possible))
    return found


def check_domains(world: World) -> None:
    for version, hosts, possible in missing_domains(world):
        raise Violation("domains", world, f"version {version} is safe on {hosts} hosts, and {possible} could hold it")


def check_nothing_forgotten(world: World) -> None:
    assert world.hub is not None
    known = {worker.name: worker.machine.directive for worker in world.workers.values()}
    known["hub"] = world.hub.registry.histories["run", "actor"].directive
    if len(set(known.values())) > 1 or known["hub"] != world.directive:
        raise Violation("forgotten", world, f"{known} differ, or from {world.directive}")


def check_served(link: Link, segment: int, data: bytes) -> None:
    """An offer stands until it is withdrawn, and until then nobody uses its memory for anything else."""
    world, offer = link.world, link.offer
    assert offer is not None
    if world.verify and not offer.withdrawn and data != truth(link.key, world.trainers.shard_count)[segment]:
        raise Violation("served", world, f"{link.source.name} serves segment {segment} of {link.key}, with other bytes")
