"""One rank of the trainer of `--real`: FSDP2 over gloo, on the CPU. Reads "publish VERSION" lines, answers in JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.bench.sizes.predict import KEEP
from tensorhub_plugins.core import Client, Publisher, Turns, fsdp2_parts

TIMEOUT_S = 120.0


class Collectives(TorchDispatchMode):
    """A counter of collectives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def main(rank: int, ranks: int, slices: int, folder: str, hub: str) -> None:
    """Run one rank; torch's environment variables say where the ranks meet."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    client = Client(hub, run="sizes", model="m", replica="trainer", shard=rank, shard_count=ranks)
    how: dict[str, Any] = {"keep": KEEP, "timeout_s": TIMEOUT_S, "dtype": torch.bfloat16, "slices": slices}
    publisher = Publisher(client, rank=rank, ranks=ranks, worker=f"trainer/{rank}", **how, slices_experts=True)
    answer({"started": True})
    for line in sys.stdin:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        with Collectives() as collectives:
            metrics = publisher.publish_parts(int(line), fsdp2_parts(model.state_dict(), Turns(rank, ranks)))
        answer({"part": metrics["tensorhub/publish/bytes"], "collectives": collectives.count})
    publisher.close()
    dist.destroy_process_group()


def answer(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:6])
