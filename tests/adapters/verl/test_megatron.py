"""What the ranks of a real Megatron model hold, put together, is what verl's own export gathers: name by name and byte
by byte, for mbridge and for Megatron-Bridge, without a collective of weights.

Real megatron-core on CPU processes, whose groups are gloo's, loaded from a checkpoint by the bridge, and exported by it
after an update. Its layers are megatron-core's local ones under the names of Transformer Engine's, which needs a GPU:
the bridges know no others. `make test-megatron` fetches what this needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 900
BRIDGES = {"mbridge": "mbridge", "megatron-bridge": "megatron.bridge"}


class Case(NamedTuple):
    """family: of CONFIGS. ranks: tensor, pipeline, expert, expert tensor parallel, of so many in all."""

    family: str
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int | None = None
    extra: str = ""

    @property
    def name(self) -> str:
        sizes = "-".join(f"{k}{v}" for k, v in zip(("tp", "pp", "ep", "etp"), self[2:6], strict=True) if v > 1)
        return "-".join(
            filter(None, (self.family, f"of{self.ranks}", sizes, f"vpp{self.vpp}" if self.vpp else "", self.extra))
        )


DENSE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "num_key_value_heads": 8},  # a key and a value for every query
    "qwen2": {**DENSE, "num_key_value_heads": 2},  # with biases
    "qwen2-tied": {**DENSE, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {**DENSE, "num_key_value_heads": 4, "head_dim": 16},  # norms of queries and keys; heads wider than hidden
    "qwen3_moe": {**DENSE, **EXPERTS, "num_key_value_heads": 4, "head_dim": 16},
    "mixtral": {**DENSE, **EXPERTS, "num_key_value_heads": 4, "head_dim": 4},
    "qwen2_moe": {**DENSE, **EXPERTS, "num_key_value_heads": 4, "shared_expert_intermediate_size": 40},
    "glm4_moe": {
        **DENSE,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "use_qk_norm": True,
        "attention_bias": True,
    },  # with a bias of the router in float32, which is no parameter
}
CASES = [
    Case("llama"),
    Case("llama", 2, tp=2),
    Case("llama", 4, tp=2),  # and two data parallel
    Case("llama", 4, pp=4),
    Case("qwen2", 2, tp=2),
    Case("qwen2", 4, tp=4),  # fewer key heads than ranks
    Case("qwen2", 4, tp=2, pp=2),
    Case("qwen2-tied", 2, pp=2),
    Case("qwen2-tied", 4, tp=2, pp=2),
    Case("qwen3", 4, tp=4),
    Case("qwen3", 4, tp=2, pp=2, vpp=2),
    Case("qwen3", 2, pp=2, extra="uneven"),
    Case("qwen3", 2, tp=2, extra="padded"),
    Case("qwen3_moe", 1),
    Case("qwen3_moe", 2, ep=2),
    Case("qwen3_moe", 4, ep=4),
    Case("qwen3_moe", 4, tp=2, ep=2),
    Case("qwen3_moe", 4, tp=2, ep=2, etp=2),
    Case("qwen3_moe", 4, tp=2, ep=4),
    Case("qwen3_moe", 4, pp=2, ep=2),
    Case("mixtral", 4, tp=4, ep=2, etp=2),
    Case("mixtral", 2, ep=2, extra="fp32"),
    Case("qwen2_moe", 4, tp=2, pp=2, ep=2),
    Case("glm4_moe", 4, tp=2, ep=2),
]
# Megatron-Bridge 0.3.1 has none of the first two models, was not tried with the third, and loads no vocabulary that the
# ranks do not divide.
MBRIDGE_ALONE = {
    case for case in CASES if case.family in ("mixtral", "qwen2_moe", "glm4_moe") or case.extra == "padded"
}
BROKEN = [Case("qwen3", 2, tp=2, extra="broken")]  # the control: heads that are taken for others
GATHERED = [Case("qwen3", 2, pp=2, extra="scaled")]  # one rank's bridge computes something


# --- the ranks -------------------------------------------------------------------------------------------------------


def stand_ins() -> None:
    """Let megatron-core be imported where there is no GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = SimpleNamespace
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


class _StandInType(type):
    """A class, and its attributes are such classes: what Megatron-Bridge names and a CPU never calls."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInType(name, (torch.nn.Module,), {})


class _StandInModule(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return sys.modules[full] if full in sys.modules else _StandInType(name, (torch.nn.Module,), {})


class StandIns:
    """Finds modules that Megatron-Bridge imports and that are not installed. megatron-core has been imported by then:
    it would take them for the real ones."""

    NAMES = (
        "transformer_engine",
        "mamba_ssm",
        "causal_conv1d",
        "nvidia_resiliency_ext",
        "mlflow",
        "qwen_vl_utils",
        "timm",
    )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.NAMES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def block_spec(config: Any, stage: int | None) -> Any:
    """Return the layers that verl's engine would have of Transformer Engine: the same parameters in the same places."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    class TENorm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, **kwargs: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
            self.weight.sequence_parallel = config.sequence_parallel

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    class Grouped(MegatronModule):
        axis = 0

        def __init__(
            self, count: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, **kwargs: Any
        ) -> None:
            super().__init__(config=config)
            shape = [output_size, input_size]
            shape[self.axis] //= pg_collection.expt_tp.size()
            for expert in range(count):
                weight = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
                weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, self.axis, 1
                weight.allreduce = False
                setattr(self, f"weight{expert}", weight)

    class TEColumnParallelGroupedLinear(Grouped):
        pass

    class TERowParallelGroupedLinear(Grouped):
        axis = 1

    moe = config.num_moe_experts is not None
    if moe:
        shared = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = MLPSubmodules(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear)
        mlp = ModuleSpec(
            module=MoELayer,
            submodules=MoESubmodules(
                experts=ModuleSpec(module=TEGroupedMLP, submodules=experts),
                shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
            ),
        )
    else:
        dense = MLPSubmodules(linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=RowParallelLinear)
        mlp = ModuleSpec(module=MLP, submodules=dense)
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=TELayerNormColumnParallelLinear,
                    core_attention=DotProductAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=TENorm if config.qk_layernorm else IdentityOp,
                    k_layernorm=TENorm if config.qk_layernorm else IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=TENorm if moe else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    layers = [layer] * get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)


def chunks_of(case: Case, config: Any, hf_config: Any) -> list[Any]:
    """Return this rank's chunks of the model."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    chunks = []
    for stage in range(case.vpp or 1):
        virtual = {"vp_stage": stage} if case.vpp else {}
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, stage if case.vpp else None),
            vocab_size=hf_config.vocab_size + (-hf_config.vocab_size % 8 if case.extra == "padded" else 0),
            max_sequence_length=64,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=not case.vpp, **virtual),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=not case.vpp, **virtual),
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            position_embedding_type="rope",
            **virtual,
        )
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    return chunks


def with_mbridge(case: Case, path: str) -> tuple[Any, list[Any]]:
    """Return mbridge's bridge, and the model, loaded from the checkpoint by it."""
    from mbridge import AutoBridge
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(path)
    dtype = torch.float32 if case.extra == "fp32" else torch.bfloat16
    padded = {"make_vocab_size_divisible_by": 8} if case.extra == "padded" else {}
    bridge = AutoBridge.from_config(hf_config, dtype=dtype, **padded)
    uneven = {"num_layers_in_first_pipeline_stage": 1} if case.extra == "uneven" else {}
    bridge.set_extra_args(use_cpu_initialization=True, bias_activation_fusion=False, **uneven)
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = hf_config.vocab_size + (-hf_config.vocab_size % 8 if padded else 0)
    chunks = chunks_of(case, bridge.config, hf_config)
    with torch.no_grad():
        bridge.load_weights(chunks, path)
    return bridge, chunks


def with_megatron_bridge(case: Case, path: str) -> tuple[Any, list[Any]]:
    """Return Megatron-Bridge's, made as verl does, and the model, loaded from the checkpoint by it."""
    from verl.models.mcore.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(path)
    provider = bridge.to_megatron_provider(load_weights=False)
    given = {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "sequence_parallel": case.tp > 1,
        "params_dtype": torch.float32 if case.extra == "fp32" else torch.bfloat16,
        "variable_seq_lengths": True,
        "pipeline_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,  # Transformer Engine's, as the next one
        "moe_permute_fusion": False,
        "moe_token_dispatcher_type": "alltoall",  # as verl sets it
        **({"num_layers_in_first_pipeline_stage": 1} if case.extra == "uneven" else {}),
    }
    for name, value in given.items():
        setattr(provider, name, value)
    provider.finalize()
    chunks = chunks_of(case, provider, bridge.hf_pretrained.config)
    with torch.no_grad():
        bridge.load_hf_weights(chunks, path)
    return bridge, chunks


def engine_of(case: Case, path: str, vanilla: bool) -> Any:
    """Return verl's own engine, around a model of ours."""
    from megatron.core import parallel_state as mpu
    from verl.workers.engine.megatron import transformer_impl

    mpu.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    bridge, chunks = (with_mbridge if vanilla else with_megatron_bridge)(case, path)
    engine = object.__new__(transformer_impl.MegatronEngineWithLMHead)
    engine.module, engine.bridge, engine.vanilla_bridge = chunks, bridge, vanilla
    engine.peft_cls, engine._qat_enabled, engine._hf_export_tasks = None, False, None
    engine.engine_config = SimpleNamespace(use_megatron_fsdp=False)
    engine.model_config = SimpleNamespace(lora={}, hf_config=None)
    engine.model_config.hf_config = bridge.hf_config if vanilla else bridge.hf_pretrained.config
    return engine


def assembled(all_held: list[list[tuple[str, torch.Tensor, Any, tuple[int, ...]]]]) -> dict[str, torch.Tensor]:
    """Put the parts of all ranks together. Every element must come once."""
    made: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for name, tensor, start, shape in (part for held in all_held for part in held):
        whole = made.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
        count = times.setdefault(name, torch.zeros(shape, dtype=torch.int32))
        box = tuple(slice(s, s + n) for s, n in zip(start or [0] * tensor.ndim, tensor.shape, strict=True))
        assert whole.dtype == tensor.dtype
        whole[box], count[box] = tensor, count[box] + 1
    assert {name: int(count.min()) for name, count in times.items()} == dict.fromkeys(times, 1)
    assert {name: int(count.max()) for name, count in times.items()} == dict.fromkeys(times, 1)
    return made


def run(case: Case, vanilla: bool, path: str, rank: int) -> dict[str, Any]:
    """Export twice, an update between, as verl does and by parts. Return what rank 0 has seen."""
    from test_verl_parts import Collectives
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    from tensorhub_plugins.verl import megatron, parts

    parts.watch()
    engine = engine_of(case, path, vanilla)
    gather = MegatronEngine.get_per_tensor_param.__wrapped__
    if case.extra == "broken":
        honest = megatron.held_places
        megatron.held_places = lambda tensor, found: honest(tensor, [_as_value(place) for place in found])
    if case.extra == "scaled" and rank == 1:
        compute_something(engine)
    seen: dict[str, Any] = {"tensors": 0, "differ": [], "collectives": [], "problem": "", "shares": []}
    for step in range(2):
        truth: dict[str, torch.Tensor] = {}
        for name, tensor in gather(engine)[0]:
            if name not in truth:  # mbridge exports a tied embedding once more, from the last stage
                truth[name] = tensor.detach().clone()
            elif not torch.equal(truth[name], tensor):
                seen["differ"].append(f"{name} is exported twice, differently")
        weights, _ = engine.get_per_tensor_param()
        if not isinstance(weights, parts.Weights):
            seen["problem"] = megatron.why_gathered(engine)
            assert sorted(dict(weights)) == sorted(truth)
            return seen
        with Collectives() as collectives:
            held = list(weights.held())
        seen["collectives"] += list(collectives.seen)
        assert sorted({one.whole.name for one in held}) == sorted(truth)
        assert all(one.tensor is None or one.tensor.is_contiguous() for one in held)
        assert case in BROKEN or all(_views(one.tensor, engine) for one in held if one.tensor is not None)
        mine = [(o.whole.name, o.tensor, o.part and o.part.start, o.whole.shape) for o in held if o.tensor is not None]
        all_held: list[Any] = [None] * case.ranks
        torch.distributed.all_gather_object(all_held, mine)
        made = assembled(all_held)
        assert sorted(made) == sorted(truth)
        seen["tensors"] = len(truth)
        seen["differ"] += [
            name
            for name, tensor in truth.items()
            if made[name].dtype != tensor.dtype
            or made[name].shape != tensor.shape
            or not torch.equal(made[name], tensor)
        ]
        seen["shares"] = [sum(tensor.nbytes for _, tensor, _, _ in each) for each in all_held]
        with torch.no_grad():  # an update
            for chunk in engine.module:
                for parameter in chunk.parameters():
                    parameter.mul_(1.0 + 0.5 * (step + 1))
    return seen


def compute_something(engine: Any) -> None:
    """Have this rank's bridge add 1 to the last norm, if to the numbers alone: what it exports is as it was."""
    if engine.vanilla_bridge:
        convert = engine.bridge._weight_to_hf_format

        def scaled(name: str, tensor: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
            names, made = convert(name, tensor)
            return names, [each + 1 if "model.norm.weight" in names else each for each in made]

        engine.bridge._weight_to_hf_format = scaled
        return
    (mapping,) = [
        task.mapping for task in engine._mbridge_export_tasks() if task.mapping.hf_param == "model.norm.weight"
    ]
    export = mapping.megatron_to_hf
    mapping.megatron_to_hf = lambda weight, module: (
        {"model.norm.weight": weight + 1} if weight.dtype == torch.float64 else export(weight, module)
    )


def _as_value(place: Any) -> Any:
    """Return the place of a group's key as if it were where its value is."""
    return place._replace(source=place.source + place.length) if "k_proj" in place.name else place


def _views(tensor: torch.Tensor, engine: Any) -> bool:
    memory = {parameter.untyped_storage()._cdata for chunk in engine.module for parameter in chunk.parameters()}
    memory |= {buffer.untyped_storage()._cdata for chunk in engine.module for buffer in chunk.buffers()}
    return tensor.untyped_storage()._cdata in memory


def checkpoint_of(case: Case, folder: Path) -> str:
    """Write a checkpoint of random weights, by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / case.family
    given = CONFIGS[case.family]
    if case.extra == "padded":
        path, given = folder / f"{case.family}-padded", {**given, "vocab_size": 93}
    if not path.exists():
        torch.manual_seed(1)
        config = AutoConfig.for_model(case.family.partition("-")[0], **given, dtype="bfloat16")
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # norms, too
                parameter.normal_()
        model.save_pretrained(path)
    return str(path)


def main(rank: int, case: Case, vanilla: bool, path: str, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=case.ranks)
    seen = run(case, vanilla, path, rank)
    if rank == 0:
        (folder / "seen").write_text(json.dumps(seen))
    torch.distributed.barrier()
    os._exit(0)


def all_cases(vanilla: bool, names: list[str]) -> None:
    """Run each case in processes that are forked from this one: importing Megatron takes long."""
    stand_ins()
    for module in ("megatron.core.models.gpt.gpt_model", "verl.workers.engine.megatron.transformer_impl"):
        import_module(module)
    if not vanilla:
        sys.meta_path.append(StandIns())
    import_module("mbridge" if vanilla else "megatron.bridge")
    with tempfile.TemporaryDirectory() as root:
        for case in [*CASES, *BROKEN, *GATHERED]:
            if (names and case.name not in names) or (case in MBRIDGE_ALONE and not vanilla):
                continue
            with tempfile.TemporaryDirectory(dir=root) as given:
                folder, path, pids = Path(given), checkpoint_of(case, Path(root)), []
                for rank in range(case.ranks):
                    pid = os.fork()
                    if not pid:
                        try:
                            main(rank, case, vanilla, path, folder)
                        except BaseException:
                            traceback.print_exc()
                        os._exit(1)
                    pids.append(pid)
                codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
                seen = json.loads((folder / "seen").read_text()) if (folder / "seen").exists() else {}
                print(json.dumps({"name": case.name, "codes": codes, **seen}), flush=True)


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BRIDGES)
def seen(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return what came out of every case, with one of the bridges."""
    package = BRIDGES[request.param]
    if find_spec("megatron") is None or find_spec(package) is None:
        pytest.skip(f"{package} is not installed: `make test-megatron`")
    command = [sys.executable, __file__, request.param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment())
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(lines) >= len([*CASES, *BROKEN, *GATHERED]) - len(MBRIDGE_ALONE), done.stderr[
        -4000:
    ]
    return {line["name"]: line for line in lines}


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tests" / "adapters" / "verl"), os.environ["PYTHONPATH"]])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_parts_of_all_ranks_are_what_verl_exports(seen: dict[str, dict[str, Any]], case: Case) -> None:
    if case.name not in seen:
        assert case in MBRIDGE_ALONE
        pytest.skip("with mbridge alone")
    found = seen[case.name]
    assert (found["codes"], found["problem"], found["differ"]) == ([0] * case.ranks, "", [])
    assert found["collectives"] == [] and found["tensors"] > 30
    assert max(found["shares"]) < (1.1 if case.pp == 1 else 2.0) * sum(found["shares"]) / case.ranks + 20_000


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.timeout(TIMEOUT_S)
def test_a_wrong_order_of_heads_is_seen(seen: dict[str, dict[str, Any]]) -> None:
    (case,) = BROKEN
    assert set(seen[case.name]["differ"]) == {f"model.layers.{n}.self_attn.k_proj.weight" for n in range(4)}


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.timeout(TIMEOUT_S)
def test_all_ranks_gather_where_the_bridge_of_one_computes_something(seen: dict[str, dict[str, Any]]) -> None:
    (case,) = GATHERED
    assert seen[case.name]["codes"] == [0, 0]
    assert seen[case.name]["problem"].endswith("model.norm.weight: its elements are computed, not moved")


if __name__ == "__main__":
    all_cases(sys.argv[1] == "mbridge", sys.argv[2:])
