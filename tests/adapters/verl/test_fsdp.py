"""Two real FSDP ranks publish one model; a reader gets it whole, from both. FSDP1 and FSDP2, bf16 and fp32 masters."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from torch_ranks import leave, started  # noqa: E402

from recipes.ranks import free_port  # noqa: E402
from tensorhub_plugins.core import CHECKPOINT, Client, start_server  # noqa: E402
from tensorhub_plugins.core.cli import fetch_status  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
RANKS = 2
STEPS = 2
CASES = [(strategy, dtype) for strategy in ("fsdp1", "fsdp2") for dtype in ("bfloat16", "float32")]


def build():
    torch.manual_seed(0)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(64, 96), torch.nn.Tanh(), linear(96, 33), linear(33, 8))


def gathered(module):
    """As verl's FSDP engine hands the weights over (get_per_tensor_param): a collective for every tensor."""
    from torch.distributed.tensor import DTensor

    for name, parameter in module.state_dict().items():
        yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def train(rank, port, address, folder):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo", rank=rank, world_size=RANKS)
    for case in CASES:
        train_case(rank, address, *case, Path(folder))
    dist.destroy_process_group()


def train_case(rank, address, strategy, dtype, folder):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from tensorhub_plugins.core.client.publisher import Publisher

    module, mesh = build().to(getattr(torch, dtype)), init_device_mesh("cpu", (RANKS,))
    if strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

        module = FullyShardedDataParallel(module, device_mesh=mesh, device_id=torch.device("cpu"))
        kind = StateDictType.SHARDED_STATE_DICT
        FullyShardedDataParallel.set_state_dict_type(module, kind, ShardedStateDictConfig())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    model = f"{strategy}-{dtype}"
    client = Client(address, run="r", model=model, replica="trainer", shard=rank, shard_count=RANKS)
    publisher = Publisher(client, rank=rank, ranks=RANKS, worker=f"trainer/{rank}", keep=2, timeout_s=60)
    for step in range(1, STEPS + 1):
        publisher.publish(step, gathered(module))
        truth = {name: tensor.clone() for name, tensor in gathered(module)}
        if rank == 0:  # what the reader must find, told in another way
            torch.save(truth, folder / "part")
            os.rename(folder / "part", folder / f"{model}.{step}")
        dist.barrier()
        module(torch.ones(4, 64, dtype=getattr(torch, dtype))).sum().backward()
        optimizer.step()  # the weights change while the version is published
    with Client(address, run="r", model=f"end of {model}", replica=f"trainer-{rank}") as end:
        end.wait(1, timeout_s=60)  # the reader has what it came for
    publisher.close()


@pytest.mark.heavy  # three processes that import verl
def test_two_ranks_publish_one_model(tmp_path):
    with start_server() as server, started(__file__, RANKS, free_port(), server.address, tmp_path) as ranks:
        for strategy, dtype in CASES:
            read(server.address, f"{strategy}-{dtype}", getattr(torch, dtype), tmp_path)
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS


def read(address, model, dtype, folder):
    with Client(address, run="r", model=model, replica="reader") as reader:
        for step in range(1, STEPS + 1):
            reader.wait(step, timeout_s=90)
            check(reader.fetch(step, (CHECKPOINT,), timeout_s=30), folder / f"{model}.{step}", dtype)
    with Client(address, run="r", model=f"end of {model}", replica="reader") as end:
        end.publish(1, {"done": torch.ones(1)})
        for _ in range(1200):  # this client stays until both ranks have heard it and left
            if model not in publishing(address):
                break
            time.sleep(0.05)


def publishing(address):
    return [m["model"] for m in fetch_status(address)["models"] if m["workers"]]


def check(fetched, path, dtype):
    for _ in range(1200):  # rank 0 writes it right after it has published
        if path.exists():
            break
        time.sleep(0.05)
    truth = torch.load(path)
    tensors = fetched.tensors()
    assert sorted(tensors) == sorted(truth)
    for name, expected in truth.items():
        assert tensors[name].dtype == dtype
        torch.testing.assert_close(tensors[name], expected, rtol=0, atol=0)
    assert sorted(fetched.report.sources) == ["trainer/0", "trainer/1"]
    assert max(fetched.report.sources.values()) < 0.8 * fetched.report.size_bytes


if __name__ == "__main__":
    train(int(sys.argv[1]), *sys.argv[2:])
    leave()
