"""Quantized layers, with vLLM's own classes on a CPU: nothing is computed, only loaded, reloaded and copied.

Engines with quantized weights do not run on vLLM's CPU build. What goes wrong with them happens while weights are
loaded, and that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm_layers import only_rank

from tensorhub_plugins.core import VersionRefused
from tensorhub_plugins.vllm.worker import checkpoint_contract, reload, weights
from tensorhub_plugins.vllm.worker.conversion import Conversion
from tensorhub_plugins.vllm.worker.kernel_references import DEPTH_MAX, rebind

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with only_rank(tmp_path_factory.mktemp("group")) as made:
        yield made


class _Model(torch.nn.Module):
    """Loads by name, as vLLM's models do."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name not in parameters:
                raise ValueError(f"no parameter {name}")
            parameters[name].weight_loader(parameters[name], tensor)
            loaded.add(name)
        return loaded


@pytest.fixture
def fp8(config: Any, monkeypatch: pytest.MonkeyPatch) -> _Model:
    """One linear layer whose checkpoint is FP8 with a scale; the choice of a kernel, of which a CPU has none, is left
    out."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **settings: SimpleNamespace(), raising=False)
    model = _Model()
    with torch.device("cpu"):
        quantization = fp8.Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic")
        model.linear = ColumnParallelLinear(64, 32, bias=False, quant_config=quantization, prefix="linear")
    assert model.linear.weight.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.ones(parameter.shape))
    record_metadata_for_reloading(model)
    return model


def checkpoint_of(model: _Model, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(p.shape, 3.0).to(dtype if name == "linear.weight" else p.dtype)
        for name, p in model.named_parameters()
    }


@pytest.mark.smoke
def test_bfloat16_is_not_cast_into_fp8(fp8: _Model, config: Any) -> None:
    """1000.0 would become 448.0, with a scale that nobody has written."""
    before = {name: p.detach().clone() for name, p in fp8.named_parameters()}
    given = checkpoint_of(fp8, torch.bfloat16)
    advice = "publish them so, or have them made of floats: start it with --quantization fp8"
    with pytest.raises(VersionRefused, match=f"linear.weight is bfloat16, linear.weight is float8_e4m3fn.*{advice}"):
        checkpoint_contract.rehearse(fp8, config, given)
    del given["linear.weight_scale"]
    with pytest.raises(VersionRefused, match=advice):
        checkpoint_contract.rehearse(fp8, config, given)
    for name, parameter in fp8.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name


def test_a_missing_scale_is_refused_by_name(fp8: _Model, config: Any) -> None:
    given = checkpoint_of(fp8, torch.float8_e4m3fn)
    del given["linear.weight_scale"]
    with pytest.raises(VersionRefused, match="linear.weight_scale .* gets 0 of 1 elements"):
        checkpoint_contract.rehearse(fp8, config, given)


def test_a_checkpoint_that_is_quantized_alike_is_taken(fp8: _Model, config: Any) -> None:
    given = checkpoint_of(fp8, torch.float8_e4m3fn)
    assert checkpoint_contract.rehearse(fp8, config, given).used == given.keys()


EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}
FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None, how: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": how, "ignore": [], "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    "checkpoints",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
        {"quant_method": "auto_gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "dynamic": {}},
        compressed({**EIGHT, "strategy": "channel"}, {**EIGHT, "strategy": "token", "dynamic": True}, "int-quantized"),
        compressed(FOUR, None, "pack-quantized"),
    ],
    ids=["awq", "gptq", "int8", "int4"],
)
def test_floats_for_who_takes_another_kind_are_refused_with_what_to_do(
    checkpoints: dict[str, Any], config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    named = checkpoints["quant_method"]
    quantization = get_quantization_config(named).from_config(checkpoints)
    if named == "auto_gptq":
        quantization.modules_in_block_to_quantize = ["linear"]
    model = _Model()
    with torch.device("cpu"):
        model.linear = ColumnParallelLinear(
            128, 64, bias=False, quant_config=quantization, prefix="linear", params_dtype=torch.bfloat16
        )
    record_metadata_for_reloading(model)
    monkeypatch.setattr(config.model_config, "quantization", named)
    said = rf"linear.weight.*takes weights that are quantized already \({named}\): publish them so.*--quantization fp8"
    with pytest.raises(VersionRefused, match=said):
        checkpoint_contract.rehearse(model, config, {"linear.weight": torch.ones(64, 128, dtype=torch.bfloat16)})


# --- kernels that remember ---


class _Kernel:
    def __init__(self, scale: torch.Tensor) -> None:
        self.quant_config = SimpleNamespace(w1=(scale, 1), scales={"w1": [scale.view(-1)[1:]]})


def _remembering_model(*, derives: bool) -> _Model:
    """A layer whose method keeps references to its scale, as vLLM's MoE methods do; or a tensor made from it."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    class Remembers(QuantizeMethodBase):
        kernel: _Kernel | None = None

        def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None: ...

        def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any: ...

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            self.kernel = _Kernel(layer.scale * 2 if derives else layer.scale.data)

    model = _Model()
    model.experts = torch.nn.Module()
    for name, shape in (("weight", (4, 8)), ("scale", (4,))):
        parameter = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
        parameter.weight_loader = default_weight_loader
        model.experts.register_parameter(name, parameter)
    model.experts.quant_method = Remembers()
    record_metadata_for_reloading(model)
    model.experts.quant_method.process_weights_after_loading(model.experts)
    return model


def _checkpoint(value: float) -> dict[str, torch.Tensor]:
    return {"experts.weight": torch.full((4, 8), value), "experts.scale": torch.full((4,), value)}


def _remembered(model: _Model) -> list[float]:
    quant_config = model.experts.quant_method.kernel.quant_config
    return [float(quant_config.w1[0][0]), float(quant_config.scales["w1"][0][0])]


@pytest.mark.parametrize("rebinds", [True, False])
def test_a_kernel_reads_the_scales_of_a_raw_copy_after_a_reload(
    rebinds: bool, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it: the weights of version 3, with the scales of version 2."""
    if not rebinds:
        from tensorhub_plugins.vllm.worker import kernel_references

        monkeypatch.setattr(kernel_references, "rebind", lambda root, moved, skip: 0)
    model = _remembering_model(derives=False)
    reload.reload_checkpoint(model, config, _checkpoint(2.0).items())
    assert _remembered(model) == [2.0, 2.0]
    source = {name: torch.full_like(tensor, 3.0) for name, tensor in weights.tensors(model).items()}
    weights.copy_tensors(weights.tensors(model), source)
    assert _remembered(model) == ([3.0, 3.0] if rebinds else [2.0, 2.0])
    reload.reload_checkpoint(model, config, _checkpoint(4.0).items())
    assert _remembered(model) == [4.0, 4.0]


@pytest.mark.parametrize("derives", [True, False])
def test_what_kernels_derive_for_themselves_forbids_raw_copies(
    derives: bool, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _remembering_model(derives=derives)
    conversion = Conversion(model, config)
    assert conversion.install(_checkpoint(2.0)) == "reload"
    assert _remembered(model) == ([4.0, 4.0] if derives else [2.0, 2.0])
    assert bool(conversion.hidden) == derives
    if derives:
        assert all("quant_method.kernel" in name for name in conversion.hidden)


def test_references_are_found_wherever_they_are() -> None:
    old, new = torch.arange(4.0), torch.arange(4.0) + 10
    stranger = torch.arange(4.0)
    root = SimpleNamespace(a=old, b=[old[2:], stranger], c={"d": (old.view(2, 2), "text")}, own=None)
    root.own = root  # in a circle
    assert rebind(root, [(old, new)], skip=set()) == 3
    assert root.a is new and root.b[0].tolist() == [12, 13] and root.c["d"][0].tolist() == [[10, 11], [12, 13]]
    assert root.b[1] is stranger
    new.zero_()
    assert root.b[0].tolist() == [0, 0]
    assert rebind(root, [(old, new)], skip=set()) == 0 and DEPTH_MAX > 4
