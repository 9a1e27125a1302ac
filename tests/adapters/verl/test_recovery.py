"""verl's own FSDP engine saves and loads, and the weights come from the store: two real ranks, which are killed.

The checkpoint's weights are replaced by others before the second start, so that what is in the parameters shows where
it came from.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from torch_ranks import await_version, leave, started  # noqa: E402
from verl_run import replace_weights  # noqa: E402

from recipes.ranks import free_port  # noqa: E402
from tensorhub_plugins.core import Client, start_server  # noqa: E402
from tensorhub_plugins.verl.versions import version_of_step  # noqa: E402

RANKS = 2
SAVED, LAST = 4, 5  # steps
READ = "read\n"
TIMEOUT_S = 240
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(3 * TIMEOUT_S)]


def build(strategy):
    """verl's engine, its optimizer and its checkpoints around a model, without what it needs to train."""
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.workers.engine.fsdp import transformer_impl

    size = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**size, **heads)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    if strategy == "fsdp2":
        for layer in module.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        module = FullyShardedDataParallel(module, device_mesh=mesh, device_id=torch.device("cpu"))
    transformer_impl.get_device_id = lambda: "cpu"  # verl knows no CPU
    transformer_impl.load_fsdp_model_to_gpu = lambda module: None
    engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    engine.module, engine._is_offload_param, engine._is_offload_optimizer = module, False, False
    engine._uses_fsdp2_cpu_offload_policy = engine._qat_enabled = False
    engine.model_config = SimpleNamespace(lora={}, hf_config=config)
    engine.optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    engine.checkpoint_manager = FSDPCheckpointManager(
        module, engine.optimizer, torch.optim.lr_scheduler.ConstantLR(engine.optimizer), checkpoint_config={}
    )
    engine.checkpoint_manager.processing_class = None
    return engine


def train(engine):
    engine.module(torch.arange(8).view(1, 8)).logits.pow(2).mean().backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def held(engine):
    from tensorhub_plugins.core import AllHeld
    from tensorhub_plugins.verl import parts

    return {one.whole.name: one.tensor.clone() for one in parts.held_by_rank(engine, AllHeld) if one.tensor is not None}


def main(rank: int, port: str, start: str, address: str, folder: Path, strategy: str, mode: str, dtype: str) -> None:
    import torch.distributed as dist

    from tensorhub_plugins.verl.trainer import TensorHubCheckpointEngine

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("cpu:gloo", rank=rank, world_size=RANKS)
    options = {"hub": address, "run": "r", "dtype": dtype, "recover_weights": mode, "timeout_s": 20}
    store = TensorHubCheckpointEngine(1 << 20, is_master=rank == 0, **options)
    engine = build(strategy)
    checkpoint = str(folder / "actor")

    def publish(step):
        store.init_process_group(address, step)
        weights, _ = engine.get_per_tensor_param()
        asyncio.run(store.send_weights(weights, global_steps=step))

    if start == "first":
        for step in range(SAVED - 1, LAST + 1):
            train(engine)
            if step == SAVED:  # as verl does, before the update
                engine.save_checkpoint(checkpoint, global_step=step)
            publish(step)
            torch.save(held(engine), folder / f"{step}.{rank}")
            assert sys.stdin.readline() == READ
        os.kill(os.getpid(), signal.SIGKILL)
    engine.load_checkpoint(checkpoint)
    torch.save(held(engine), folder / f"found.{rank}")
    assert {int(each["step"]) for each in engine.optimizer.state.values()} == {2}  # of the checkpoint
    publish(SAVED)
    train(engine)  # and the training goes on
    publish(SAVED + 1)
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize(
    ("strategy", "mode", "dtype", "step"),
    [
        ("fsdp2", "resumed_step", "float32", SAVED),
        ("fsdp1", "resumed_step", "float32", SAVED),
        ("fsdp2", "latest", "bfloat16", LAST),
        ("fsdp2", "resumed_step", "bfloat16", None),  # of which the trainer's weights cannot be made
        ("fsdp2", "off", "float32", None),
    ],
)
def test_the_weights_come_from_the_store(
    tmp_path: Path, strategy: str, mode: str, dtype: str, step: int | None
) -> None:
    common = (tmp_path, strategy, mode, dtype)
    with start_server() as server, Client(server.address, run="r", model="actor", replica="keeper") as keeper:
        with started(__file__, RANKS, free_port(), "first", server.address, *common) as ranks:
            for number in range(SAVED - 1, LAST + 1):
                await_version(keeper, version_of_step(number), ranks, TIMEOUT_S)
                keeper.fetch(version_of_step(number), serve=True)
                for rank in ranks:
                    rank.stdin.write(READ)
                    rank.stdin.flush()
            assert [rank.wait(TIMEOUT_S) for rank in ranks] == [-signal.SIGKILL] * RANKS
        replace_weights(tmp_path / "actor")
        with started(__file__, RANKS, free_port(), "second", server.address, *common) as ranks:
            assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0] * RANKS
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"found.{rank}")
        if step is None:
            assert all(tensor.eq(0.5).all() for tensor in found.values())
            continue
        for number in (SAVED, LAST):
            expected = torch.load(tmp_path / f"{number}.{rank}")
            if dtype == "bfloat16":  # what has one dimension is published as it is
                expected = {
                    n: t.bfloat16().float() if "norm" not in n and "bias" not in n else t for n, t in expected.items()
                }
            assert expected.keys() == found.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()) == (number == step)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5], Path(sys.argv[5]), *sys.argv[6:9])
    leave()
