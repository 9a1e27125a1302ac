"""Which tensors of a model are its weights, and when two models may trade them. No engine is started."""

from __future__ import annotations

import ast
import enum
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_layers import only_rank

from tensorhub_plugins.core import Slab, UsageError
from tensorhub_plugins.vllm import names
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.worker import cpu, fingerprint, weights


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.proj = torch.nn.Linear(3, 3)
        self.proj.weight = torch.nn.Parameter(torch.randn(3, 3).t())  # transposed: dense, not row-major
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("alias", self.table[2:4], persistent=False)
        self.padded = torch.nn.Parameter(torch.randn(4, 8)[:, :5])  # rows with gaps between them
        self.mla = torch.nn.Module()
        self.mla.W_UV = torch.randn(2, 2)
        self.mla.kv_cache = torch.zeros(100)
        self.packed = torch.nn.Parameter(torch.empty(0))


def test_every_weight_once_and_no_kv_cache() -> None:
    found = weights.tensors(Model())
    assert sorted(found) == ["embed.weight", "mla.W_UV", "padded", "proj.bias", "proj.weight", "table"]
    assert all(tensor.is_contiguous() for tensor in found.values())
    assert found["padded"].shape == (4 * 8 - 3,)
    Slab.adopt(found)  # what the store can serve in place


def test_views_that_take_turns_in_their_memory_are_one_tensor() -> None:
    """As MLA's two matrices of a kv_b_proj that is quantized: peers had no raw copies of such a model."""
    one, other = Model(), Model()
    for model in (one, other):
        matrix = torch.randn(3, 4, 2 + 5)
        model.mla.W_UK_T, model.mla.W_UV = matrix[..., :2].permute(1, 2, 0), matrix[..., 2:].transpose(0, 1)
    found = weights.tensors(one)
    assert "mla.W_UV" not in found and found["mla.W_UK_T"].shape == (3 * 4 * 7,)
    Slab.adopt(found)
    weights.copy_tensors(found, weights.tensors(other))
    assert torch.equal(one.mla.W_UK_T, other.mla.W_UK_T) and torch.equal(one.mla.W_UV, other.mla.W_UV)


class PackedMLA(torch.nn.Module):
    """What vLLM's MLA does on a CPU with AMX: it packs into its implementation, and frees what it packed."""

    is_amx_bmm_enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(3, 4, bias=False)
        self.impl = SimpleNamespace(_w_uk_packed=None, _w_uv_packed=None)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.impl._w_uk_packed, self.impl._w_uv_packed = self.kv_b_proj.weight.detach().to(act_dtype).clone().chunk(2)
        self.kv_b_proj.weight = torch.nn.Parameter(torch.empty(0))


def test_what_mla_packs_for_amx_is_seen_and_stays_in_its_place() -> None:
    model = PackedMLA()
    process = cpu._living_mla(PackedMLA.process_weights_after_loading)
    process(model, torch.float32)
    root = torch.nn.Module()
    root.mla = model
    before = weights.tensors(root)
    assert set(before) == {"mla.W_K", "mla.W_V", "mla.kv_b_proj.weight"}
    with torch.no_grad():
        model.kv_b_proj.weight += 1
    process(model, torch.float32)
    after = weights.tensors(root)
    assert {name: each.data_ptr() for name, each in after.items()} == {n: e.data_ptr() for n, e in before.items()}
    assert torch.equal(torch.cat([model.impl._w_uk_packed, model.impl._w_uv_packed]), model.kv_b_proj.weight)
    assert model.impl._w_uk_packed is model.W_K and model.impl._w_uv_packed is model.W_V


def test_writing_them_writes_the_model() -> None:
    one, other = Model(), Model()
    with torch.no_grad():
        other.table += 1
    weights.copy_tensors(weights.tensors(one), weights.tensors(other))
    for name, tensor in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], tensor), name
    assert torch.equal(one.head.weight, other.embed.weight)
    assert torch.equal(one.alias, other.table[2:4])
    assert torch.equal(one.mla.W_UV, other.mla.W_UV)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("table"), r"source lacks \['table'\]"),
        (lambda t: t.update(extra=torch.zeros(1)), r"model lacks \['extra'\]"),
        (lambda t: t.update(table=torch.zeros(7)), "'table' differs"),
        (lambda t: t.update(table=torch.zeros(6, dtype=torch.float64)), "'table' differs"),
    ],
)
def test_tensors_that_differ_are_refused_before_a_byte_is_written(change: Any, says: str) -> None:
    model, source = Model(), weights.tensors(Model())
    before = {name: tensor.clone() for name, tensor in weights.tensors(model).items()}
    change(source)
    with pytest.raises(UsageError, match=says):
        weights.copy_tensors(weights.tensors(model), source)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.tensors(model).items())


def test_scalars_follow_their_buffers() -> None:
    layer = torch.nn.Module()
    layer.register_buffer("_k_scale", torch.tensor(1.0))
    layer._k_scale_float = 1.0
    layer._k_scale.fill_(0.25)
    weights.refresh_derived(layer)
    assert layer._k_scale_float == 0.25


def test_scalars_are_read_at_once_and_no_layer_is_asked_for_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number by itself waits for its device, and torch makes an error of each question: while the engine stands
    still."""
    model, asked = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4)), []
    for layer in model:
        for name, dtype in (("_q_scale", torch.float32), ("_k_scale", torch.float64), ("_v_scale", torch.float32)):
            layer.register_buffer(name, torch.ones(1, dtype=dtype))
            setattr(layer, f"{name}_float", 1.0)
    for number, buffer in enumerate(model.buffers()):
        buffer.fill_(number + 0.5)
    look, read = torch.nn.Module.__getattr__, torch.Tensor.tolist

    def counted(module: torch.nn.Module, name: str) -> Any:
        try:
            return look(module, name)
        except AttributeError:
            asked.append(name)
            raise

    monkeypatch.setattr(torch.nn.Module, "__getattr__", counted)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: asked.append("tolist") or read(tensor))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: asked.append("float"))
    weights.refresh_derived(model)
    assert asked == ["tolist", "tolist"]  # one for each dtype
    found = [getattr(layer, f"_{name}_scale_float") for layer in model for name in "qkv"]
    assert found == [number + 0.5 for number in range(12)]


@pytest.mark.slow  # vLLM is imported
def test_what_vllm_derives_in_the_first_step_follows(tmp_path: Path) -> None:
    with only_rank(tmp_path):
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        from vllm.model_executor.layers.rotary_embedding.fope import FourierRotaryEmbedding

        def layers(seed: int) -> Any:
            torch.manual_seed(seed)
            model: Any = torch.nn.Module()
            model.rope = FourierRotaryEmbedding(8, 8, 16, 1e4, True, torch.float32, False, 2, 4, True, 0.5)
            model.moe = MoERunner.__new__(MoERunner)
            torch.nn.Module.__init__(model.moe)
            model.moe._combined_gate_weight = None
            model.moe.gate, model.moe.shared_expert_gate = torch.nn.Linear(8, 4), torch.nn.Linear(8, 1)
            model.attention = torch.nn.Module()
            model.attention.impl = SimpleNamespace(bmm1_scale=0.1, bmm2_scale=0.2)
            model.attention.patch_pos_embed = torch.ones(1)  # as a vision tower has it
            for coefficients in (model.rope.cos_coef, model.rope.sin_coef):
                coefficients.data.normal_()
            return model

        @torch.inference_mode()
        def step(model: Any) -> list[torch.Tensor]:
            ones = torch.ones(3, 16)
            model.moe._maybe_fuse_gate_weights()
            return [*model.rope.forward_native(torch.arange(3), ones, ones), model.moe._combined_gate_weight]

        live, other = layers(1), layers(2)
        before = [tensor.clone() for tensor in step(live)]
        kept = live.moe._combined_gate_weight.data_ptr()
        for mine, theirs in zip(live.parameters(), other.parameters(), strict=True):
            mine.data.copy_(theirs)
        assert all(torch.equal(*pair) for pair in zip(step(live), before, strict=True))  # the control
        weights.refresh_derived(live)
        assert all(torch.equal(*pair) for pair in zip(step(live), step(other), strict=True))
        assert live.moe._combined_gate_weight.data_ptr() == kept
        assert live.attention.patch_pos_embed is None
        assert live.attention.impl.bmm1_scale is live.attention.impl.bmm2_scale is None


# vLLM's back ends for hardware that the store was not run on.
NOT_OURS = ("rocm", "aiter", "xpu", "turboquant")


def lazy_scales() -> dict[str, list[ast.If]]:
    """Return the statements of vLLM's back ends that make something of scales while it is None, by file and class."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    found: dict[str, list[ast.If]] = {}
    for path in sorted(Path(spec.origin).parent.glob("v1/attention/backends/**/*.py")):
        if any(word in path.name for word in NOT_OURS):
            continue
        for made in (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.ClassDef)):
            guards = [
                each
                for each in ast.walk(made)
                if isinstance(each, ast.If)
                and re.fullmatch(r"(self|layer)\.\w+ is None", ast.unparse(each.test))
                and "scale" in ast.unparse(ast.Module(each.body, type_ignores=[]))
                and made_by(each)
            ]
            if guards:
                found[f"{path.stem}.{made.name}"] = guards
    return found


def made_by(guard: ast.If) -> set[str]:
    """Return the attributes that it sets, if the one that it looks at is among them."""
    stores = (each for each in ast.walk(guard) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    names = {each.attr for each in stores}
    return names if ast.unparse(guard.test).partition(".")[2].split()[0] in names else set()


@pytest.mark.slow  # they are parsed
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="its sources are read")
def test_what_back_ends_make_of_scales_once_is_made_again() -> None:
    """Where one of several that belong together stayed, what was made of the others lacked it: an output that
    FlashInfer quantizes was not divided by its scale any more."""
    found = {name: set().union(*map(made_by, guards)) for name, guards in lazy_scales().items()}
    assert {"flashinfer.FlashInferImpl", "flashinfer_mla.FlashInferMLAImpl"} <= found.keys()
    for name, attributes in found.items():
        model: Any = torch.nn.Module()
        model.layer, impl = torch.nn.Module(), SimpleNamespace(**dict.fromkeys(attributes, 0.5), scale=0.25)
        model.layer.impl, model.layer._o_scale_float = impl, 0.5
        weights.refresh_derived(model)
        kept = {each for each in attributes - {"_o_scale_float"} if getattr(impl, each) is not None}
        assert not kept and model.layer._o_scale_float is None and impl.scale == 0.25, name


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="its sources are read")
def test_a_second_step_of_flashinfer_has_the_scales_of_the_first_one() -> None:
    """vLLM's own statements, as those of its forward pass are."""
    guards = lazy_scales()["flashinfer.FlashInferImpl"]
    code = compile(ast.Module(guards, type_ignores=[]), "flashinfer", "exec")

    def step(model: Any, output_scale: float) -> tuple[float, float]:
        names: dict[str, Any] = {"self": model.layer.impl, "layer": model.layer, "output": torch.empty(0)}
        names |= {"FP8_DTYPE": torch.float32, "FP4_DTYPE": torch.uint8, "output_scale": torch.tensor(output_scale)}
        exec(code, {**names, "is_quantized_kv_cache": lambda dtype: True})
        return model.layer.impl.bmm1_scale, model.layer.impl.bmm2_scale

    def made(k_scale: float) -> Any:
        model: Any = torch.nn.Module()
        model.layer = layer = torch.nn.Module()
        for name in ("_q_scale", "_k_scale", "_v_scale"):
            layer.register_buffer(name, torch.tensor(k_scale))
            setattr(layer, f"{name}_float", k_scale)
        layer._o_scale_float = None
        none: Any = dict.fromkeys(("bmm1_scale", "bmm2_scale", "o_sf_scale"))
        layer.impl = SimpleNamespace(scale=0.125, kv_cache_dtype="fp8", **none)
        return model

    live, fresh = made(2.0), made(4.0)
    before = step(live, 8.0)
    for buffer in live.buffers():
        buffer.fill_(4.0)
    assert step(live, 16.0) == before != step(fresh, 16.0)  # the control
    weights.refresh_derived(live)
    assert step(live, 16.0) == step(fresh, 16.0)


@pytest.mark.parametrize("version", ["0.24.0", "0.29.0+cpu", "0.33.2"])
def test_supported_versions(version: str) -> None:
    names.check_version(version)


@pytest.mark.parametrize("version", ["0.23.3", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(UsageError, match="supported range 0.24 to 0.33 of tensorhub: install a version in that range"):
        names.check_version(version)


def test_a_part_that_needs_a_newer_version_says_so() -> None:
    with pytest.raises(UsageError, match="supported range 0.28 to 0.33 of its weight transfer: install"):
        names.check_version("0.27.1", first=names.WEIGHT_TRANSFER_FIRST, what="its weight transfer")


class Backend(enum.Enum):
    TRITON = 1
    CUTLASS = 2


def described(**changes: Any) -> bytes:
    """A fingerprint of a small model, with some of what it depends on changed."""
    pytest.importorskip("vllm")
    settings = {"hidden": 3, "dtype": "bfloat16", "quantization": None, "kv": "auto", "tp": 0, "path": "/a"}
    settings |= {"backend": Backend.TRITON, "weight": torch.zeros(2, 4), "placement": "linear"} | changes
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.weight = torch.nn.Parameter(settings["weight"])
    model.layer.quant_method = SimpleNamespace(backend=settings["backend"])
    hf_config = {"hidden_size": settings["hidden"], "_name_or_path": settings["path"]}
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: hf_config),
            dtype=settings["dtype"],
            quantization=settings["quantization"],
        ),
        cache_config=SimpleNamespace(cache_dtype=settings["kv"]),
        parallel_config=SimpleNamespace(expert_placement_strategy=settings["placement"]),
    )
    return fingerprint.fingerprint(model, config, ranks={"tp": settings["tp"], "tp_size": 2})


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 4},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"kv": "fp8"},
        {"tp": 1},
        {"placement": "round_robin"},
        {"backend": Backend.CUTLASS},  # the same shapes, packed for another kernel
        {"weight": torch.zeros(2, 5)},
        {"weight": torch.zeros(2, 4, dtype=torch.float16)},
        {"weight": torch.zeros(4, 2).t()},
    ],
    ids=str,
)
def test_engines_that_differ_do_not_trade_raw_bytes(change: dict[str, Any]) -> None:
    assert described(**change) != described()


def test_engines_that_differ_in_what_does_not_matter_do() -> None:
    assert described(path="/b", weight=torch.ones(2, 4)) == described()


def test_the_processor_packs_weights_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    def of_processor(isa: str) -> bytes:
        monkeypatch.setattr(fingerprint, "_cpu_isa", lambda: isa)
        return described()

    assert of_processor("AVX2") != of_processor("AVX512")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: (9, 0))
    assert of_processor("AVX2") == of_processor("AVX512"), "equal GPUs in different hosts trade raw bytes"


def test_a_replica_has_one_layout_that_depends_on_all_its_workers() -> None:
    a, b, c = described(tp=0), described(tp=1), described(tp=1, hidden=9)
    layouts = [fingerprint.replica_layout(prints) for prints in ([a, b], [b, a], [a, c], [a])]
    assert len(set(layouts)) == 4
    assert all(layout.startswith("runtime:") for layout in layouts)
    assert fingerprint.replica_layout([a, b]) == layouts[0]


def test_digests_are_the_stores() -> None:
    tensor = torch.randn(5, 7).to(torch.bfloat16)
    slab = Slab.adopt({"t": tensor})
    assert weights.digest(tensor) == slab.digest(0, slab.size_bytes).hex()
    assert weights.digest(tensor) != weights.digest(tensor.flip(0).contiguous())
    assert weights.digest(torch.tensor(1.5)) == weights.digest(torch.tensor([1.5]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hubb": "tcp://h:1"}, "has no option 'hubb': did you mean 'hub'"),
        ({"zzz": 1}, "the options are hub, run"),
        ({"hub": "h:1"}, "option hub is 'h:1': give the address"),
        ({"run": 3}, "run"),
        ({"install": "quick"}, "install"),
        ({"install": "direct", "serve_from": "host"}, 'use serve_from="live"'),
    ],
)
def test_a_wrong_configuration_is_refused(change: dict[str, Any], says: str) -> None:
    good = {"hub": "tcp://h:1", "run": "r", "model": "m", "replica": "p", "location": {"host": "h"}}
    assert WorkerConfig.parse(good).source == "host"
    assert WorkerConfig.parse(good | {"install": "direct"}).source == "live"
    with pytest.raises(UsageError, match=says):
        WorkerConfig.parse(good | change)
