"""verl's own FSDP engine hands the weights over, and each rank publishes what it holds: names and bytes are those that
verl itself gathers. Two real ranks; dense and with experts, tied, FSDP1 and FSDP2."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from torch_ranks import await_version, leave, started  # noqa: E402

from recipes.ranks import free_port  # noqa: E402
from tensorhub_plugins.core import Client, contiguous_spec, start_server  # noqa: E402
from tensorhub_plugins.verl import parts  # noqa: E402
from tensorhub_plugins.verl.versions import version_of_step  # noqa: E402
from tensorhub_plugins.vllm.checkpoint_names import checkpoint_tensors  # noqa: E402
from tensorhub_plugins.vllm.lora import adapter_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
RANKS = 2
READ = "read\n"  # what a rank hears when its case has been read
TIMEOUT_S = 240
CONFIG_SIZE_BYTES_MAX = 4096  # of an adapter's configuration
STEPS = (1, 2)
CASES = [
    *("fsdp2 dense", "fsdp1 dense", "fsdp1 experts originals", "fsdp2 experts", "fsdp2 dense gathered", "broken"),
    *("fsdp1 mixtral originals", "fsdp2 mixtral", "fsdp2 mixtral gathered"),  # named as in a checkpoint
    *("fsdp1 lora", "fsdp2 lora"),
]


def build(kind):
    import transformers

    torch.manual_seed(0)
    common = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    if kind == "experts":
        config = transformers.Qwen3MoeConfig(
            **common, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=16
        )
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**common, num_local_experts=3)
    else:
        config = transformers.Qwen2Config(**common, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if kind == "lora":
        import peft

        layers = ["q_proj", "down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=layers, task_type="CAUSAL_LM"))
    return model


def engine_of(case):
    """verl's engine around a model, without what it needs to train."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType, fully_shard
    from verl.workers.engine.fsdp import transformer_impl

    strategy, kind, *how = (case if case != "broken" else "fsdp2 dense").split()
    module, mesh = build(kind), init_device_mesh("cpu", (RANKS,))
    hf_config, is_lora = module.config, kind == "lora"
    if strategy == "fsdp2":
        for layer in module.get_submodule("base_model.model.model.layers" if is_lora else "model.layers"):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        policy = transformer_impl.get_fsdp_wrap_policy(module, is_lora=True) if is_lora else None
        module = FullyShardedDataParallel(
            module,
            auto_wrap_policy=policy,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params="originals" in how,
        )
        state = StateDictType.SHARDED_STATE_DICT
        FullyShardedDataParallel.set_state_dict_type(module, state, ShardedStateDictConfig())
    transformer_impl.get_device_id = lambda: "cpu"  # verl knows no CPU
    transformer_impl.load_fsdp_model_to_gpu = lambda module: None
    transformer_impl.log_gpu_memory_usage = lambda *args, **kwargs: None
    engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    engine.module, engine._is_offload_param, engine._uses_fsdp2_cpu_offload_policy = module, False, False
    engine._qat_enabled, engine.model_config = False, SimpleNamespace(lora={}, hf_config=hf_config)
    return engine


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def main(rank, port, address, folder):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo", rank=rank, world_size=RANKS)
    for case in CASES:
        run_case(case, rank, address, Path(folder))
    dist.barrier()
    dist.destroy_process_group()


def stays(name, tensor):
    return parts.keeps_dtype(contiguous_spec(name, tensor.dtype, tensor.shape))


def adapter_of_all(module):
    """What PEFT saves of it. verl's own way finds nothing in FSDP1's modules."""
    wraps = FullyShardedDataParallel.summon_full_params(module, writeback=False)
    with wraps if isinstance(module, FullyShardedDataParallel) else contextlib.nullcontext():
        names = [(clean_tensor_name(name), tensor) for name, tensor in module.named_parameters() if "lora_" in name]
        whole = {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in names}
    return {name.replace(".default", ""): tensor for name, tensor in whole.items()}


def run_case(case, rank, address, folder):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from tensorhub_plugins.verl.trainer import TensorHubCheckpointEngine

    name = case.replace(" ", "-")
    gathers, is_lora = "gathered" in case, "lora" in case
    engine = engine_of(case)
    store = TensorHubCheckpointEngine(
        1 << 20, is_master=rank == 0, hub=address, run="r", model=name, dtype="bfloat16", keep=3, parts=not gathers
    )
    parts.watch()  # twice is fine
    gather = getattr(FSDPEngine.get_per_tensor_param, "__wrapped__", FSDPEngine.get_per_tensor_param)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.5)
    if case == "broken" and rank == 1:  # the control: a rank whose weights are others
        honest = parts.held_by_rank
        parts.held_by_rank = lambda e: (
            h._replace(tensor=None if h.tensor is None else h.tensor + 1) for h in honest(e)
        )
    for step in STEPS:
        truth = adapter_of_all(engine.module) if is_lora else {name: t.detach() for name, t in gather(engine)[0]}
        if "mixtral" in case:  # of which verl makes names that vLLM does not load
            assert "model.layers.0.mlp.experts.2.up_proj.weight" in truth
            state = engine.module.state_dict()
            whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
            truth = checkpoint_tensors(engine.module, whole)
        truth = {name: t if stays(name, t) else t.bfloat16() for name, t in truth.items()}
        assert {tensor.dtype for tensor in truth.values()} == {torch.bfloat16, *([] if is_lora else [torch.float32])}
        if rank == 0:
            torch.save(truth, folder / f"{name}.{step}")
        with Collectives() as collectives:
            weights, adapter = engine.get_per_tensor_param()
            metrics = asyncio.run(store.send_weights(weights, global_steps=step))
        assert adapter is None
        assert isinstance(weights, parts.Weights)
        assert (sum(collectives.seen.values()) > 0) == gathers, collectives.seen
        if rank == 0:
            size_bytes = sum(tensor.nbytes for tensor in truth.values())
            assert 0 <= metrics["tensorhub/publish/bytes"] - size_bytes <= (CONFIG_SIZE_BYTES_MAX if is_lora else 0)
        engine.module(torch.arange(8).view(1, 8)).logits.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sys.stdin.readline() == READ
    store._publisher.close()
    parts.held_by_rank = honest if case == "broken" and rank == 1 else parts.held_by_rank


@pytest.mark.smoke
@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_what_the_ranks_hold_is_what_verl_gathers(tmp_path):
    with start_server() as server, started(__file__, RANKS, free_port(), server.address, tmp_path) as ranks:
        for case in CASES:
            read(server.address, case, tmp_path, ranks)
        assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0] * RANKS


def read(address, case, folder, processes):
    name = case.replace(" ", "-")
    with Client(address, run="r", model=name, replica="reader") as reader:
        for step in STEPS:
            await_version(reader, version_of_step(step), processes, TIMEOUT_S)
            fetched = reader.fetch(version_of_step(step), timeout_s=60)
            truth, tensors = torch.load(folder / f"{name}.{step}"), fetched.tensors()
            if "lora" in case:
                tensors, config = adapter_of(tensors)
                assert (config["r"], config["target_modules"]) == (3, ["down_proj", "q_proj"]) and len(truth) == 8
            assert sorted(tensors) == sorted(truth)
            assert all(tensors[n].dtype == tensor.dtype for n, tensor in truth.items())
            differ = [n for n, tensor in truth.items() if not torch.equal(tensors[n], tensor)]
            assert bool(differ) == (case == "broken"), differ
            assert sorted(fetched.report.sources) == ["trainer/0", "trainer/1"]
            assert any(".experts.2.up_proj.weight" in n for n in truth) == ("experts" in case)
            assert any(".block_sparse_moe.experts.2.w3.weight" in n for n in truth) == ("mixtral" in case)
    for process in processes:
        process.stdin.write(READ)
        process.stdin.flush()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"_qat_enabled": True}, parts.QAT),
        ({"module": SimpleNamespace(peft_config={})}, parts.LORA),
        ({"module": SimpleNamespace(_fsdp_wrapped_module=SimpleNamespace(peft_config={}))}, parts.LORA),
    ],
)
def test_what_only_whole_tensors_are_good_for_is_gathered(change, why):
    engine = SimpleNamespace(_qat_enabled=False, module=torch.nn.Linear(2, 2))
    vars(engine).update(change)
    assert parts.why_gathered(engine) == why


SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 13,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
ROUTED = {"n_routed_experts": 3, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
CUT = {"num_experts": 3, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("family", "more", "is_renamed"),
    [
        ("Mixtral", {"num_local_experts": 3}, True),
        ("Mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}, True),
        ("Phimoe", {"num_local_experts": 3}, True),
        ("Lfm2Moe", CUT, True),  # verl leaves its experts fused
        ("Qwen3Moe", {"num_experts": 3, "head_dim": 16}, False),
        ("DeepseekV3", ROUTED, False),
        ("GptOss", {"num_local_experts": 3, "head_dim": 16}, False),
        ("Qwen2", {}, False),
    ],
)
def test_names_are_verls_where_a_checkpoint_has_them_and_else_the_checkpoints(family, more, is_renamed, monkeypatch):
    import transformers
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    engine = SimpleNamespace(module=model, model_config=SimpleNamespace(hf_config=config))
    gathered = dict(unfuse_moe_params(model.state_dict().items(), config.model_type))
    saved = parts.as_saved(engine)
    assert bool(saved) == is_renamed
    published = dict(parts._renamed(gathered.items(), saved))
    held = {one.whole.name: one.tensor for one in parts.held_by_rank(engine)}
    assert held.keys() == published.keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in held.items())
    if not is_renamed:
        assert all(published[name] is tensor for name, tensor in gathered.items()) and len(published) == len(gathered)
        return
    truth = checkpoint_tensors(model)
    assert published.keys() == truth.keys() and published.keys() != gathered.keys()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in published.items())
    storages = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in held.values()} <= storages  # no copies


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
    leave()
