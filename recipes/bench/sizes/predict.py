"""The cost of one version in three ways: what each process fetches, holds and requests. Arithmetic on plans and tables.

now         each trainer rank publishes the parts that FSDP2 has given it, slice by slice; each worker of the engine
            that converts fetches what it needs; all others read what they run from a worker that has it, in
            their own host where there is one
before      each trainer rank is given all tensors, gathered one by one, and publishes its share of them; each worker
            of the engine that converts fetches all
verl nccl   each trainer rank is given all tensors, the first one broadcasts them in buckets, and each worker is
            given all (verl/checkpoint_engine/nccl_checkpoint_engine.py); between hosts NCCL carries them once for
            each host
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from recipes.bench.sizes.models import MODELS, Model, Worker, worker_of
from recipes.bench.sizes.ranks import Rank
from tensorhub_plugins.core import Part, TensorSpec, TensorTable, slices_of
from tensorhub_plugins.vllm.worker.plan import Shapes, specs_of, whole_region

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\..*")
KEEP, KEPT_BEFORE = 1, 2  # versions on offer, by default; memory is taken for one more
# To the hub, for a version in the steady state, where no source is slow or lost: of a trainer rank, Publish, Unpublish,
# and Wait before that (which was not); of a worker that converts, Acquire, Publish, Unpublish, and a Release for each
# trainer rank; of one that reads from a peer and serves what arrives, one Publish more, and one Release.
OF_RANK, OF_CONVERTER, OF_PEER = 3, 3, 5


@dataclass(frozen=True)
class Fleet:
    """The engines and hosts. engines: of all hosts. workers: on one host."""

    ranks: int
    tp: int
    workers: int = 8
    hosts: int = 2

    @property
    def engines(self) -> int:
        return self.hosts * self.workers // self.tp

    @property
    def converters(self) -> int:
        """Return the workers of the engine that converts on its first host."""
        return min(self.tp, self.workers)


@dataclass(frozen=True)
class Costs:
    """The costs in bytes, but requests. needed: by a worker that converts; fetched: by it. first, other: into the host
    of the engine that converts, and into one without, from other hosts. memory: the most on the former host, for
    versions, where peers read a copy; memory_live: where they read the live weights. part: of a trainer rank; trainer:
    the most that it takes. gathered: what each trainer rank receives from other ranks."""

    needed: int
    fetched: int
    first: int
    other: int
    memory: int
    memory_live: int
    part: int
    trainer: int
    gathered: int
    requests: int


def ways_by_engine(name: str) -> dict[str, dict[str, dict[str, int]]]:
    """Return the costs by engine and way, for all engines of this model; fields as of Costs. Call it in a process of
    its own, see ranks.py."""
    model = MODELS[name]
    return {
        **{f"{name}, TP {tp}": _ways(model, Rank(tp_size=tp)) for tp in model.tp},
        **{f"{name}, TP {tp} with EP": _ways(model, Rank(tp_size=tp), experts=True) for tp in model.ep},
        **{f"{name}, DP {dp} with EP": _ways(model, Rank(dp_size=dp), experts=True) for dp in model.dp},
    }


def _ways(model: Model, rank: Rank, *, experts: bool = False) -> dict[str, dict[str, int]]:
    first, workers = [worker_of(model, rank, experts=experts)], rank.tp_size * rank.dp_size
    fleet = Fleet(model.ranks, workers, hosts=2 if workers <= Fleet.workers else 4)
    tables = trainer_tables(first[0].plan.shapes, model.ranks, workers, experts=not experts)
    found = {"now": now(first, fleet, tables), "before": before(first, fleet), "verl nccl": nccl(first, fleet)}
    return {way: asdict(costs) for way, costs in found.items()}


def trainer_tables(shapes: Shapes, ranks: int, slices: int, *, experts: bool = True) -> list[TensorTable]:
    """Return what each rank publishes of a model of these tensors that FSDP2 shards."""
    count = experts_in(shapes)
    held: list[list[TensorSpec]] = [[] for _ in range(ranks)]
    for name, (dtype, shape) in shapes.items():
        (whole,) = specs_of(name, dtype, shape, [whole_region(shape)])
        found = EXPERT.fullmatch(name)
        if found:  # all experts of a layer are one tensor of the trainer
            held[int(found[2]) // -(-count[found[1]] // ranks)].append(whole)
            continue
        for rank, first, rows in _chunks(shape[0], ranks):
            size = (rows, *shape[1:])
            part = None if rows == shape[0] else Part(tuple(shape), (first, *(0 for _ in shape[1:])))
            held[rank].append(TensorSpec(name, whole.dtype, size, whole.size_bytes // shape[0] * rows, None, part))
    return [
        TensorTable.of(piece.spec for each in mine for piece in slices_of(each, slices, experts=experts))
        for mine in held
    ]


def experts_in(shapes: Iterable[str]) -> dict[str, int]:
    """Return how many experts each layer has, of a model of these tensors."""
    count: dict[str, int] = {}
    for name in shapes:
        if found := EXPERT.fullmatch(name):
            count[found[1]] = max(count.get(found[1], 0), int(found[2]) + 1)
    return count


def _chunks(size: int, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield rank, first row and number of rows that torch's chunk gives each rank; some ranks may have none."""
    each = -(-size // ranks)
    for rank, first in enumerate(range(0, size, each)):
        yield rank, first, min(each, size - first)


def now(workers: list[Worker], fleet: Fleet, tables: list[TensorTable]) -> Costs:
    """Return the costs of the store today. workers: all of one engine, or its first one, which represents all."""
    needed = _mean([worker.plan.needed_bytes for worker in workers])
    fetched = _mean([sum(map(worker.reads, tables)) for worker in workers])
    part = max(table.size_bytes for table in tables)
    holds = _mean([worker.holds_bytes for worker in workers])
    return _costs(needed, fetched, holds, fleet, part, gathered=0)


def before(workers: list[Worker], fleet: Fleet) -> Costs:
    whole, part = workers[0].plan.checkpoint_bytes, workers[0].plan.checkpoint_bytes // fleet.ranks
    holds = _mean([worker.holds_bytes for worker in workers])
    costs = _costs(whole, whole, holds, fleet, part, gathered=whole - part)
    arriving = fleet.converters * whole
    return replace(
        costs,
        # Of each worker its own: the version that is served, and the next one; and what that is made of.
        memory=fleet.workers * 2 * holds + arriving,
        memory_live=(fleet.workers - fleet.converters) * holds + arriving,
        trainer=(KEPT_BEFORE + 1) * part,
        requests=costs.requests - fleet.ranks,
    )


def nccl(workers: list[Worker], fleet: Fleet) -> Costs:
    whole = workers[0].plan.checkpoint_bytes
    part = whole // fleet.ranks
    return Costs(whole, whole, whole, whole, 0, 0, part, 0, whole - part, 0)


def _mean(values: list[int]) -> int:
    return sum(values) // len(values)


def _costs(needed: int, fetched: int, holds: int, fleet: Fleet, part: int, *, gathered: int) -> Costs:
    distinct = min(fleet.tp, fleet.workers)  # of what a host's engines run, each is there once
    peers = fleet.engines * fleet.tp - fleet.tp
    return Costs(
        needed,
        fetched,
        first=fleet.converters * fetched,
        other=distinct * holds,
        # What the next version is made of, and the one that is served, in whose memory the next one is made. The other
        # engines of the host use that where it lies.
        memory=distinct * holds + fleet.converters * needed,
        # The same, but that it is a copy for them of live weights; alone there is none.
        memory_live=(distinct * holds if fleet.workers > fleet.converters else 0) + fleet.converters * needed,
        part=part,
        trainer=(KEEP + 1) * part,
        gathered=gathered,
        requests=OF_RANK * fleet.ranks + (OF_CONVERTER + fleet.ranks) * fleet.tp + OF_PEER * peers,
    )
