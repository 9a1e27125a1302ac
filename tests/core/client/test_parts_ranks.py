"""Ranks of FSDP1 and FSDP2 publish what they hold: the version is, bit for bit, what the framework itself gathers.

Real processes over gloo, on the CPU. Each case also counts: collectives (none), bytes published by a rank, and the
memory that torch takes meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from hub_limits import AT_ONCE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_ranks import await_version, leave, started

from recipes.ranks import free_port
from tensorhub_plugins.core import Client, start_server
from tensorhub_plugins.core.client import fsdp1, fsdp2
from tensorhub_plugins.core.client.parts import Turns
from tensorhub_plugins.core.client.publisher import Publisher

ROOT = Path(__file__).resolve().parents[3]
STEPS = 2
TIMEOUT_S = 150
CASES = {
    2: ["fsdp2", "fsdp2 float32", "fsdp2 columns", "fsdp2 replicas", "fsdp1", "fsdp1 originals", "fsdp1 whole"],
    3: ["fsdp2", "fsdp1", "fsdp1 originals", "broken"],
    4: ["fsdp2 mesh", "fsdp1 mesh"],
}


WHOLE_ON_EVERY_RANK = ("fsdp1 whole", "fsdp2 replicas")


class Layer(torch.nn.Linear):
    """What FSDP1 wraps by itself; tied weights may not be in two units."""


class Tied(torch.nn.Module):
    """Odd sizes, fewer rows than ranks, buffers that last and one that does not, tied weights."""

    def __init__(self, width):
        super().__init__()
        self.embed = torch.nn.Embedding(31, width)
        self.layers = torch.nn.ModuleList(Layer(width, width) for _ in range(3))
        self.norm = torch.nn.LayerNorm(width)
        self.narrow = torch.nn.Linear(width, 1)
        self.head = torch.nn.Linear(width, 31, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.arange(5.0) / 3)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("cache", torch.zeros(9), persistent=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        hidden = self.norm(hidden)
        return self.head(hidden).float().sum() + self.narrow(hidden).float().sum()


def wrapped(case, ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.tensor import Shard

    kind, _, how = case.partition(" ")
    torch.manual_seed(0)
    width = 12 * ranks if how == "columns" else 37
    module = Tied(width)
    if kind == "fsdp2":
        shape = {"replicas": (ranks, 1), "mesh": (ranks // 2, 2)}.get(how, (ranks,))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
        extra = {}
        if how == "columns":
            extra = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else Shard(0)}
        for layer in module.layers:
            fully_shard(layer, mesh=mesh, **extra)
        fully_shard(module, mesh=mesh, **extra)
        return module
    strategy = {"whole": ShardingStrategy.NO_SHARD, "mesh": ShardingStrategy.HYBRID_SHARD}.get(
        how, ShardingStrategy.FULL_SHARD
    )
    mesh = init_device_mesh("cpu", (ranks // 2, 2) if how == "mesh" else (ranks,))
    return FullyShardedDataParallel(
        module,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Layer}) if how == "originals" else None,
        use_orig_params=how == "originals",
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16) if how == "originals" else None,
    )


def gathered(module):
    """What the framework itself gathers: a collective for every tensor."""
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
    from torch.distributed.tensor import DTensor

    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(
            module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
        ):
            state = module.state_dict()
    else:
        state = module.state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}


def held(module, rank, ranks):
    if fsdp1.is_fsdp1(module):
        return fsdp1.fsdp1_parts(module, Turns(rank, ranks))
    return fsdp2.fsdp2_parts(module.state_dict(), Turns(rank, ranks))


class Watch(TorchDispatchMode):
    """Counts collectives by name, and the bytes of what torch allocates: the most that lived at once."""

    def __init__(self):
        super().__init__()
        self.collectives = Counter()
        self.known, self.live_bytes, self.peak_bytes = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.collectives[str(func)] += 1
        views = (
            func is torch.ops.aten.set_.source_Storage_storage_offset
        )  # of memory that is there: the slab, the model
        for made in tree_leaves(result) if not views else ():
            if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in given | self.known:
                self._made(made.untyped_storage())
        return result

    def _made(self, storage):
        key, size_bytes = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

        def freed():
            self.known.discard(key)
            self.live_bytes -= size_bytes

        weakref.finalize(storage, freed)


# --- one rank ---


def main(rank, ranks, port, address, folder):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo", rank=rank, world_size=ranks)
    publishers = [run_case(case, rank, ranks, address, Path(folder)) for case in CASES[ranks]]
    with Client(address, run="r", model="end", replica=f"trainer-{rank}") as end:
        end.wait(1, timeout_s=TIMEOUT_S)  # the reader has what it came for
    for publisher in publishers:
        publisher.close()
    dist.destroy_process_group()


def run_case(case, rank, ranks, address, folder):
    kind, _, how = case.partition(" ")
    module = wrapped("fsdp2" if case == "broken" else case, ranks)
    name = case.replace(" ", "-")
    client = Client(address, run="r", model=name, replica="trainer", shard=rank, shard_count=ranks)
    dtype = None if how == "float32" else torch.bfloat16
    publisher = Publisher(client, rank=rank, ranks=ranks, worker=f"trainer/{rank}", keep=3, timeout_s=60, dtype=dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(1, STEPS + 1):
        with Watch() as gather:
            truth = gathered(module)
        if rank == 0:
            torch.save(truth, folder / f"{name}.{step}")
        with Watch() as watch:
            mine = list(held(module, rank, ranks))
            if case == "broken" and rank == 2:  # the control: this rank's rows are those of another
                mine = [one._replace(tensor=one.tensor + 1) if one.tensor is not None else one for one in mine]
            metrics = publisher.publish_parts(step, iter(mine))
        largest = max(one.tensor.numel() * (dtype or torch.float32).itemsize for one in mine if one.tensor is not None)
        figures = {
            "collectives": sum(watch.collectives.values()),
            "gather": sum(gather.collectives.values()),
            "peak_bytes": watch.peak_bytes,
            "gather_peak_bytes": gather.peak_bytes,
            "largest_bytes": largest,
            "published_bytes": metrics["tensorhub/publish/bytes"],
            "tensors": len(mine),
            "whole_bytes": publisher.whole_size_bytes,
        }
        (folder / f"{name}.{step}.{rank}.json").write_text(json.dumps(figures))
        module(torch.arange(31)).backward()
        optimizer.step()
        optimizer.zero_grad()  # the weights change while the version is on offer
    return publisher


# --- the reader ---


@pytest.mark.heavy  # nine processes that import torch
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.smoke), 3, 4])
def test_parts_make_what_the_framework_gathers_and_no_rank_gathers(ranks, tmp_path):
    with (
        start_server(limits=AT_ONCE) as server,
        started(__file__, ranks, ranks, free_port(), server.address, tmp_path) as processes,
    ):
        for case in CASES[ranks]:
            read(server.address, case, ranks, tmp_path, processes)
        with Client(server.address, run="r", model="end", replica="reader") as end:
            end.publish(1, {"done": torch.ones(1)})
            assert [process.wait(TIMEOUT_S) for process in processes] == [0] * ranks


def read(address, case, ranks, folder, processes):
    name = case.replace(" ", "-")
    with Client(address, run="r", model=name, replica="reader") as reader:
        for step in range(1, STEPS + 1):
            await_version(reader, step, processes, TIMEOUT_S)
            fetched = reader.fetch(step, timeout_s=30)
            truth = torch.load(folder / f"{name}.{step}")
            if "float32" not in case:
                truth = {n: t.bfloat16() if t.is_floating_point() else t for n, t in truth.items()}
            tensors = fetched.tensors()
            assert sorted(tensors) == sorted(truth)
            same = {n: torch.equal(tensors[n], t) and tensors[n].dtype == t.dtype for n, t in truth.items()}
            assert all(same.values()) == (case != "broken"), [n for n, equal in same.items() if not equal]
            assert len(fetched.report.sources) == ranks
            texts = [(folder / f"{name}.{step}.{rank}.json").read_text() for rank in range(ranks)]
            if case != "broken":
                check_figures([json.loads(text) for text in texts], case)


def check_figures(of_ranks, case):
    whole = of_ranks[0]["whole_bytes"]
    assert sum(figures["published_bytes"] for figures in of_ranks) == whole
    for figures in of_ranks:
        assert figures["collectives"] == 0
        assert figures["published_bytes"] <= 0.75 * whole  # far from all, whichever way it is cut
        limit = 2 * figures["largest_bytes"] + 64 * figures["tensors"]  # beside the slab, which is no memory of torch's
        assert figures["peak_bytes"] <= limit
        assert (figures["gather"] > 0) == (case not in WHOLE_ON_EVERY_RANK)  # the control
        assert figures["gather_peak_bytes"] > limit


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    leave()
