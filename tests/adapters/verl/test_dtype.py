"""What is published in the rollouts' dtype, and what keeps the trainer's."""

import pytest
import torch

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")
transformers = pytest.importorskip("transformers")

from tensorhub_plugins.core import contiguous_spec  # noqa: E402
from tensorhub_plugins.verl import parts  # noqa: E402

EXPERTS = {"n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4}


def kept_in_fp32(model):
    """By transformers' own word: (name, parameter or buffer) of what it keeps in fp32 when it loads in bfloat16."""
    words = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for name, tensor in model.state_dict().items():
        if any(f".{word}." in f".{name}." for word in words):
            yield name, tensor


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe", "GptOss", "Ernie4_5_Moe", "GlmMoeDsa", "HYV3"])
def test_what_transformers_keeps_in_fp32_stays(family):
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=2, vocab_size=64, **EXPERTS)
    if hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["sparse"] * 2
    for first in ("first_k_dense_replace", "moe_layer_start_index"):
        if hasattr(config, first):
            setattr(config, first, 0)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    kept = dict(kept_in_fp32(model))
    assert kept
    cast = [name for name, tensor in kept.items() if not stays(name, tensor)]
    assert not cast
    # The control: matrices are cast, or nothing would be won.
    large = sum(tensor.numel() for name, tensor in model.state_dict().items() if not stays(name, tensor))
    assert large > 0.98 * sum(tensor.numel() for tensor in model.state_dict().values())


def stays(name, tensor):
    return parts.keeps_dtype(contiguous_spec(name, tensor.dtype, tensor.shape))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.gate.weight", (8, 64), True),
        ("model.layers.0.block_sparse_moe.gate.weight", (8, 64), True),
        ("model.layers.0.mlp.router.weight", (8, 64), True),
        ("model.layers.0.mixer.A_log", (64, 16), True),
        ("model.layers.0.mixer.conv1d.weight", (64, 1, 4), False),
        ("model.layers.0.mlp.gate_proj.weight", (64, 64), False),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", (64, 64), False),
        ("model.norm.weight", (64,), True),
        ("lm_head.weight", (100, 64), False),
    ],
)
def test_what_keeps_its_dtype(name, shape, expected):
    assert parts.keeps_dtype(contiguous_spec(name, torch.float32, shape)) is expected
