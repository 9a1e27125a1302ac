"""The cost of one version in Python, step by step: everything that visits each tensor, or each rank. No byte moves.

The trainer is one rank of many that FSDP2 shards a model over, the reader one worker of a tensor parallel engine: their
own code, with memory that nothing is written to. A version comes twice, as the second one is what a run pays for again
and again. What stands below "once" is paid by the first one alone.

"tensors" is what a step goes through: tensors of the model, or entries of tables, of which a tensor has one for each
rank and slice that holds some of it.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from recipes.bench.sizes import models
from recipes.bench.sizes.predict import trainer_tables
from recipes.bench.sizes.ranks import Rank, made
from recipes.bench.sizes.slices import shapes_of_config
from tensorhub_plugins.core import (
    CHECKPOINT,
    Fetched,
    Held,
    HubLimits,
    Location,
    Manifest,
    Publisher,
    ShardKey,
    Slab,
    TensorSpec,
    TensorTable,
    TransferLimits,
    segment_size_for,
)
from tensorhub_plugins.core.client.budget import Budget
from tensorhub_plugins.core.client.destinations import Destinations
from tensorhub_plugins.core.client.parts import Ownership
from tensorhub_plugins.core.client.serving import Serving
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.digests import NO_DIGESTS
from tensorhub_plugins.core.hub.hub import Hub, Received
from tensorhub_plugins.core.hub.outbox import Send
from tensorhub_plugins.core.memory import moves
from tensorhub_plugins.core.memory.pool import SlabPool
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.transfer import events, replication
from tensorhub_plugins.core.transfer.runner import Transfer
from tensorhub_plugins.core.transfer.source_reader import SourceReader
from tensorhub_plugins.core.transports.read_plan import ReadPlan
from tensorhub_plugins.vllm.worker import checkpoint_contract, conversion
from tensorhub_plugins.vllm.worker import plan as plans
from tensorhub_plugins.vllm.worker.plan import Plan, Shapes

FOR_EVER = 1e12
DIGEST_BYTES = 16
VERSIONS = (1, 2)


class Step(NamedTuple):
    """One step. once: it is not repeated for each version."""

    name: str
    tensors: int
    ranks: int
    do: Callable[[], object]
    once: bool = False


@dataclass(frozen=True)
class Cost:
    step: str
    tensors: int
    ranks: int
    ms: float
    once: bool

    @property
    def us_per_tensor(self) -> float:
        return self.ms * 1e3 / max(self.tensors, 1)


class Stage:
    """A model of these tensors, cut by so many ranks for engines of `tp`, and what a worker needs of it."""

    def __init__(self, plan: Plan, ranks: int, tp: int, live: Mapping[str, torch.Tensor] | None = None) -> None:
        self.plan, self.shapes, self.ranks, self.tp, self.live = plan, plan.shapes, ranks, tp, live
        self.tables = trainer_tables(self.shapes, ranks, tp)
        self.entries = sum(map(len, self.tables))
        self.key = lambda version, shard: ShardKey(version, CHECKPOINT, shard, ranks)
        budget = Budget("reader/0", 1 << 60)
        self.serving = Serving("reader/0", SlabPool(), budget)
        self.reads: dict[int, Reader] = {}


def measured(steps: Iterable[Step]) -> Iterator[Cost]:
    """Run and measure the steps in turn: a step may need the results of earlier ones."""
    gc.freeze()  # collecting looks only at what comes now
    try:
        for step in steps:
            gc.collect()
            began = time.perf_counter()
            step.do()
            yield Cost(step.name, step.tensors, step.ranks, (time.perf_counter() - began) * 1e3, step.once)
    finally:
        gc.unfreeze()


# --- a rank of the trainer ---


def of_the_trainer(stage: Stage) -> Iterator[Step]:
    shapes, ranks = stage.shapes, stage.ranks
    specs = [spec for name, (dtype, shape) in shapes.items() for spec in wholes(name, dtype, shape)]
    ownership = Ownership(ranks)
    yield Step("who keeps which tensor", len(specs), ranks, lambda: [ownership.give(s.size_bytes) for s in specs])
    rank = max(range(ranks), key=lambda rank: len(stage.tables[rank]))
    held, mine = list(held_by(stage, rank, specs)), len(stage.tables[rank])
    publisher = publisher_of(stage, rank)
    sent: dict[int, Manifest] = {}
    for version in VERSIONS:
        again, number = (version == 1), version

        def snapshot(number: int = number) -> None:
            took = publisher._snapshot_parts(number, held, Deadline.after(FOR_EVER))
            described = moves.with_parts(took.slab.specs, took.parts)
            if publisher._published:
                assert not moves.difference(sent[number - 1].tensors, described, may_move=True)
            publisher._published.append(number)
            publisher._whole = took.whole
            sent[number] = manifest_of(described, number)
            publisher.client.pool.give_back(took.slab)

        yield Step("snapshot of a rank's parts, table", mine, ranks, snapshot, once=again)
        yield Step("manifest and root of it", mine, 1, lambda number=number: sent[number].root(), once=again)


def wholes(name: str, dtype: torch.dtype, shape: torch.Size) -> list[TensorSpec]:
    return plans.specs_of(name, dtype, shape, [plans.whole_region(shape)])


def held_by(stage: Stage, rank: int, specs: list[TensorSpec]) -> Iterator[Held]:
    """Yield what FSDP2 has given a rank, before it is cut into slices: tensors without memory, all elements one."""
    boxes: dict[str, list[TensorSpec]] = {}
    for spec in stage.tables[rank]:
        boxes.setdefault(spec.tensor, []).append(spec)
    for whole in specs:
        mine = boxes.get(whole.name)
        if mine is None:
            yield Held(whole)
            continue
        regions = [plans.Region(s.part.start, s.shape) if s.part else plans.whole_region(s.shape) for s in mine]
        around = regions[0]
        for region in regions[1:]:
            around = around.around(region)
        tensor = torch.empty(1, dtype=getattr(torch, whole.dtype)).expand(around.shape)
        (spec,) = plans.specs_of(whole.name, tensor.dtype, torch.Size(whole.shape), [around])
        yield Held(whole, tensor, spec.part)


class NotWritten(Slab):
    """A target that checks what it is given, and does not write it."""

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self._target_of(name, tensor)
        self.mark_written([name])


def publisher_of(stage: Stage, rank: int) -> Publisher:
    """Make a publisher whose client only allocates."""
    pool = SlabPool()

    def allocate(specs: Iterable[TensorSpec], deadline: float) -> Slab:
        slab = pool.take(specs)
        slab.__class__ = NotWritten
        return slab

    budget = SimpleNamespace(check=lambda *_, **__: None)
    client: Any = SimpleNamespace(allocate=allocate, pool=pool, budget=budget, digest=NO_DIGESTS)
    how: dict[str, Any] = {"keep": 2, "timeout_s": 1.0, "slices": stage.tp, "slices_experts": True}
    return Publisher(client, rank=rank, ranks=stage.ranks, worker=f"trainer/{rank}", **how)


def manifest_of(table: TensorTable, version: int) -> Manifest:
    """Return a manifest with digests of no bytes, different for every version."""
    size = segment_size_for(table.size_bytes)
    return Manifest(table, bytes([version]) * (DIGEST_BYTES * -(-table.size_bytes // size)), size)


# --- the hub ---


class Crowd:
    """A hub, the ranks that publish, and a worker that reads from all of them."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.requests = stage, itertools.count(1)
        limits = HubLimits()
        self.hub, self.now = Hub(b"H" * 16, 0.0, limits), limits.grace_s + 1.0
        for shard in range(stage.ranks):
            self._join("trainer", shard, stage.ranks, Location("", "", f"t{shard // 8}"))
        for shard in range(stage.tp):
            self._join("rollout", shard, stage.tp, Location("", "", "r0"))
        self.granted: dict[int, tuple[int, messages.Granted]] = {}

    def _join(self, replica: str, shard: int, count: int, location: Location) -> None:
        endpoints = {"tcp": f"{replica}/{shard}"}
        self._say(replica, shard, messages.Hello("r", "m", replica, shard, count, location, endpoints))

    def _say(self, replica: str, shard: int, message: Any) -> list[Any]:
        session = f"{replica}/{shard}".encode().ljust(16, b".")
        return [x.message for x in self.hub.handle(Received(session, message), self.now) if isinstance(x, Send)]

    def publish(self, version: int) -> None:
        for shard in range(self.stage.ranks):
            holding = messages.Holding(self.stage.key(version, shard), b"%016d" % version, 1 << 30)
            self._say("trainer", shard, messages.Publish(next(self.requests), holding))

    def acquire(self, version: int) -> None:
        for shard in range(self.stage.tp):
            number = next(self.requests)
            asked = messages.Acquire(number, version, 0, (CHECKPOINT,), 60.0)
            granted = [x for x in self._say("rollout", shard, asked) if isinstance(x, messages.Granted)]
            self.granted[shard] = number, granted[0]

    def release(self) -> None:
        for reader, (number, granted) in self.granted.items():
            for grant in granted.grants:
                self._say("rollout", reader, messages.Release(number, grant.shard))

    def unpublish(self, version: int) -> None:
        for shard in range(self.stage.ranks):
            keys = (self.stage.key(version, shard),)
            self._say("trainer", shard, messages.Unpublish(next(self.requests), keys, 1.0))


def of_the_hub(stage: Stage) -> Iterator[Step]:
    crowd, pairs = Crowd(stage), stage.ranks * stage.tp
    yield Step("hub: all ranks publish", stage.ranks, stage.ranks, lambda: crowd.publish(1), once=True)
    yield Step("hub: all ranks publish", stage.ranks, stage.ranks, lambda: crowd.publish(2))
    yield Step("hub: all workers are granted all", pairs, stage.ranks, lambda: crowd.acquire(2))
    yield Step("hub: and release them", pairs, stage.ranks, crowd.release)
    yield Step("hub: all ranks unpublish", stage.ranks, stage.ranks, lambda: crowd.unpublish(1))


# --- a reader ---


class Reader:
    """One read of all ranks' shards. wanted: parts of the checkpoint; None: all of it."""

    def __init__(self, stage: Stage, version: int, manifests: list[Manifest], *, whole: bool = False) -> None:
        self.stage, self.version, self.manifests, self.whole = stage, version, manifests, whole
        self.moves: list[list[moves.Move]] = []

    def begin(self) -> None:
        wanted = None if self.whole else TensorTable.of(self.stage.plan.wanted)
        self.into = Destinations(self.stage.serving, serve=False, wanted=wanted, deadline=FOR_EVER)
        self.into.begin(lambda: FOR_EVER)

    def prepare(self) -> None:
        for shard, manifest in enumerate(self.manifests):
            self.into.prepare(self.stage.key(self.version, shard), manifest)

    def plan(self) -> None:
        self.moves = [moves.plan(m.tensors, self.into.slabs[k].specs) for k, m in enumerate(self.manifests)]

    def needed(self) -> None:
        self.segments = [moves.needed(m, move) for m, move in zip(self.manifests, self.moves, strict=True)]

    def lay(self) -> None:
        for shard, (manifest, move) in enumerate(zip(self.manifests, self.moves, strict=True)):
            ReadPlan(manifest, self.into.slabs[shard], move)

    def complete(self) -> None:
        self.into.complete(self.version, CHECKPOINT)
        report: Any = None
        manifests = dict(enumerate(self.manifests))
        self.fetched = Fetched(self.version, CHECKPOINT, dict(self.into.allocated), manifests, report)
        self.fetched.wanted = self.into._wanted

    def end(self) -> None:
        for slab in self.into.allocated.values():
            self.stage.serving.recycle(slab)


def of_a_reader(stage: Stage) -> Iterator[Step]:
    entries, ranks = stage.entries, stage.ranks
    encoded: list[bytes] = []
    opened: dict[int, list[Manifest]] = {}
    live: list[Reader] = []
    for version in VERSIONS:
        encoded[:] = [manifest_of(table, version).encoded for table in stage.tables]
        if version == 1:
            stage.tables.clear()  # what this process has made of them itself a reader does not know

        def decode(version: int = version) -> None:
            opened[version] = [Manifest.decode(each) for each in encoded]

        once = version == 1
        yield Step("open the ranks' manifests", entries, ranks, decode, once=once)
        stage.tables[:] = [manifest.tensors for manifest in opened[version]]
        read = stage.reads[version] = Reader(stage, version, opened[version])
        yield Step("what is wanted, by the plan", len(stage.shapes), 1, read.begin, once=once)
        yield Step("memory for every rank's part of it", entries, ranks, read.prepare, once=once)
        yield Step("which bytes go where", entries, ranks, read.plan, once=once)
        yield Step("which segments hold them", entries, ranks, read.needed, once=once)
        yield Step("lay out the reads", entries, ranks, read.lay, once=once)
        yield Step("complete", len(stage.shapes), ranks, read.complete, once=once)
        yield from of_a_transfer(stage, read, once=once)
        read.end()
        live.append(read)
    for version in VERSIONS:
        read = Reader(stage, version, opened[2], whole=True)
        read.begin()
        yield Step("whole: memory for every rank's part", entries, ranks, read.prepare, once=version == 1)
        yield Step("whole: which bytes go where", entries, ranks, read.plan, once=version == 1)
        yield Step("whole: complete", len(stage.shapes), ranks, read.complete, once=version == 1)
        read.end()


def of_a_transfer(stage: Stage, read: Reader, *, once: bool) -> Iterator[Step]:
    """Yield the steps of the machine, and of the loop around it, with everything available at once."""
    limits = TransferLimits()
    wanted = messages.Acquire(0, read.version, 0, (CHECKPOINT,), 1.0, in_part=True)
    machine = replication.Replication(wanted, FOR_EVER, wanted.timeout_s, limits=limits)
    grants = tuple(
        messages.Grant(k, b"%016d" % k, f"trainer/{k}", {}, Location(), manifest.root(), manifest.size_bytes, 0)
        for k, manifest in enumerate(read.manifests)
    )
    count = sum(map(len, read.segments))

    def run() -> None:
        todo: list[events.Event] = [
            events.Begin(),
            events.Answer(1, messages.Granted(1, read.version, CHECKPOINT, stage.ranks, grants, None)),
            *(events.Opened(k, grant.session, read.manifests[k]) for k, grant in enumerate(grants)),
        ]
        while todo and not machine.finished:
            following: list[events.Event] = []
            for event in todo:
                for effect in machine.handle(event, 0.0):
                    match effect:
                        case events.Prepare(key, _):
                            following.append(events.Prepared(key.shard, read.segments[key.shard]))
                        case events.Read(shard, session, segments):
                            following += [events.Arrived(shard, session, each, True) for each in segments]
                        case events.ConfirmEpoch(shard, session):
                            following.append(events.EpochChecked(shard, session, True))
            todo = following
        assert machine.finished

    hub: Any = SimpleNamespace(renew=lambda leases: None)
    transfer = Transfer(machine, hub, {}, read.into)
    for grant in grants:
        key = stage.key(read.version, grant.shard)
        transfer._readers[grant.shard, grant.session] = SourceReader(key, grant, {}, machine, transfer._events)

    def loop() -> None:
        for (shard, session), reader in itertools.islice(itertools.cycle(transfer._readers.items()), count):
            transfer._events.put((reader, events.Arrived(shard, session, 0, True)))
            transfer._next_event()

    yield Step("transfer: decide, segment by segment", count, stage.ranks, run, once=once)
    yield Step("transfer: look after all sources", count, stage.ranks, loop, once=once)


# --- a worker of an engine ---


def of_a_worker(stage: Stage) -> Iterator[Step]:
    """Yield the steps of a worker with what was fetched, before and during the pause."""
    count, accepted = (
        len(stage.shapes),
        checkpoint_contract.Rehearsal(stage.shapes, frozenset(stage.shapes), plan=stage.plan),
    )
    checks = checkpoint_contract.Contract(None, None)  # type: ignore[arg-type]
    checks._accepted = accepted
    converts = conversion.Conversion(None, None)  # type: ignore[arg-type]
    converts._tried, converts._plan, converts._process = stage.shapes, stage.plan, stage.plan.process
    given: list[plans.Given] = []
    for version in VERSIONS:
        fetched = stage.reads[version].fetched

        def take(fetched: Fetched = fetched) -> None:
            given[:] = [plans.given_by(fetched)]

        def check() -> None:
            checks.check(given[0].tensors, given[0].shapes)
            assert converts.fits(given[0].shapes)

        once = version == 1
        yield Step("is it worth a plan", count, 1, converts.wanted, once=once)
        yield Step("what has come, as tensors", stage.entries, stage.ranks, take, once=once)
        yield Step("is it the checkpoint as before", count, 1, check, once=once)
        if stage.live is not None:
            live = stage.live
            yield Step("pairs to copy", count, 1, lambda live=live: pairs(converts, live, given[0]), once=once)


def pairs(converts: conversion.Conversion, live: Mapping[str, torch.Tensor], given: plans.Given) -> None:
    model: Any = SimpleNamespace(named_parameters=lambda **_: live.items())
    converts._model = model
    copies = converts._copies()
    for name, held in given.held.items():
        copies(name, held)


# --- all of it ---


def costs(name: str, ranks: int | None = None, tp: int | None = None) -> list[dict[str, Any]]:
    """Return the costs for this model, by default with its own trainer and its largest engines; fields as of Cost. Call
    it in a process of its own, see ranks.py."""
    model = models.MODELS[name]
    ranks, tp = ranks or model.ranks, tp or model.tp[-1]
    config = model.config(model.layers)
    with models._folder(config) as folder, made(folder, Rank(tp, 0)) as (module, vllm_config):
        shapes, found = shapes_of_config(config), []

        def rehearse() -> None:
            found.append(checkpoint_contract.rehearse(module, vllm_config, checkpoint_contract.without_memory(shapes)))

        first = list(measured([Step("rehearse, and record the plan", len(shapes), 1, rehearse, once=True)]))
        live = {name: parameter.detach() for name, parameter in module.named_parameters(remove_duplicate=False)}
    return [asdict(cost) for cost in (*first, *measured(steps(Stage(found[0].plan, ranks, tp, live))))]


def rows(found: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the printed table."""
    yield "| step | entries | ranks | ms | per entry us | |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for each in found:
        cost, once = Cost(**each), "once" if each["once"] else ""
        cells = [cost.step, f"{cost.tensors:,}", f"{cost.ranks}", f"{cost.ms:,.1f}", f"{cost.us_per_tensor:.2f}", once]
        yield f"| {' | '.join(cells)} |"


def steps(stage: Stage) -> Iterator[Step]:
    yield from of_the_trainer(stage)
    yield from of_the_hub(stage)
    yield from of_a_reader(stage)
    yield from of_a_worker(stage)


def plan_without_loaders(shapes: Shapes) -> Plan:
    """Return the plan of a worker that takes half of every tensor, the upper or the left one."""
    needed = {}
    for name, (_, shape) in shapes.items():
        axis = 1 if "down_proj" in name else 0
        half = [size // 2 if k == axis and len(shape) > 1 else size for k, size in enumerate(shape)]
        needed[name] = (plans.whole_region(half),)
    pieces = tuple(
        plans.Piece(name, region.box_in(shapes[name][1]), name, plans.whole_region(region.shape).box_in(region.shape))
        for name, (region,) in needed.items()
    )
    return Plan(shapes, pieces, needed, frozenset())
