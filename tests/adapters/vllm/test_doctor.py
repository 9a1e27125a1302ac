"""`tensorhub doctor check-sync`: it is content with a sound sync, and notices one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
from vllm_engines import checkpoint, make_model

from tensorhub_plugins.core.errors import TensorHubError
from tensorhub_plugins.vllm.doctor import check_sync

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]  # the first engine waits for all of vLLM to be imported


def examine(model: Path, **options: Any) -> list[check_sync.Finding]:
    return list(check_sync.check_sync(model, check_sync.starter({"kv_cache_memory_bytes": 64 << 20, **options})))


def sync(findings: list[check_sync.Finding]) -> list[str]:
    return [finding.wrong for finding in findings if finding.of == "sync"]


KINDS = ("qwen2-tied", "qwen2-untied", "llama", "qwen3", "gemma", "mixtral", "qwen3-moe", "deepseek-mla")
MARKS = {"qwen2-untied": pytest.mark.smoke, "mixtral": ()}  # the others are behind `make test-vllm`


@pytest.mark.parametrize("kind", [pytest.param(k, marks=MARKS.get(k, pytest.mark.long)) for k in KINDS])
def test_a_synced_model_equals_a_fresh_one(kind: str, tmp_path: Path) -> None:
    findings = examine(make_model(kind, tmp_path, 1))
    assert sync(findings) == [""] * 5, findings
    assert "tensors and floats and 4 answers are equal" in findings[1].what


@pytest.mark.smoke
def test_the_doctor_notices_a_sync_that_forgets_a_tensor(tmp_path: Path) -> None:
    """The negative control of the test above."""
    model = make_model("qwen2-untied", tmp_path, 1)
    findings = examine(model, worker_extension_cls="vllm_faults.ForgetfulPatient")
    assert sync(findings) == ["", "", "", "1 tensors differ, first model.norm.weight"]
    assert findings[-1].of == "sync"  # and nothing else is tried then


@pytest.mark.long
def test_an_engine_that_copies_nothing_from_peers_is_sound(tmp_path: Path) -> None:
    """It was found wrong: what the doctor had zeroed for the copy, no checkpoint brought back."""
    findings = examine(make_model("llama", tmp_path, 1), worker_extension_cls="vllm_faults.HidingPatient")
    assert sync(findings) == [""] * 5, findings
    assert "copied from the checkpoint (peers do not offer copies of this model)" in findings[4].what


@pytest.mark.long
def test_a_quantized_model_runs_on_a_cpu_and_is_refused_there(tmp_path: Path) -> None:
    """The CPU build packs quantized weights where no update would be seen."""
    model = quantized(make_model("llama", tmp_path, 1))
    assert check_sync.runs_without_us(model, {}) == ""
    with pytest.raises(
        TensorHubError, match="is quantized as the checkpoint is, and the CPU build of vLLM keeps packed copies"
    ):
        examine(model)


def test_noise_is_another_checkpoint_of_the_same_shape() -> None:
    weights = {
        "ones": torch.ones(8, dtype=torch.bfloat16),
        "zeros": torch.zeros(2, 3),
        "weight": torch.randn(4, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.0),
        "packed": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "position_ids": torch.arange(4),
    }
    noise = check_sync.noise(weights)
    assert {n: (t.dtype, t.shape) for n, t in noise.items()} == {n: (t.dtype, t.shape) for n, t in weights.items()}
    assert all((noise[name] != weights[name]).all() for name in ("ones", "zeros", "weight", "scalar"))
    assert noise["position_ids"].equal(weights["position_ids"]) and not noise["packed"].equal(weights["packed"])
    assert all(noise[name].equal(again) for name, again in check_sync.noise(weights).items())


def test_the_control_asks_for_other_tensors_and_other_answers() -> None:
    def noticed(everything: dict[str, str], answers: list[Any], scratch: frozenset[str] = frozenset()) -> str:
        now = check_sync._State(["runtime"], [everything], answers)
        return check_sync._different("control", healthy, now, scratch).wrong

    healthy = check_sync._State(["runtime"], [{"weight": "1", "workspace": "2"}], [[[5], 0.25], ["token_classify", []]])
    assert noticed({"weight": "3", "workspace": "2"}, [[[5], 0.5], ["token_classify", []]]) == ""
    assert noticed({"weight": "1", "workspace": "2"}, [[[5], 0.5], []]) == "the digests are those from before"
    scratch = frozenset({"workspace"})
    assert noticed({"weight": "1", "workspace": "3"}, [[[5], 0.5], []], scratch) == "the digests are those from before"
    assert noticed({"weight": "3"}, healthy.answers).startswith("an answer is that from before")
    healthy = check_sync._State(["runtime"], [{"weight": "1"}], [["token_classify", []]])
    assert noticed({"weight": "3"}, [["token_classify", []]]).startswith("all answers are empty")


def test_malformed_checkpoints_have_one_fault_each() -> None:
    names = [f"layers.{layer}.experts.{expert}.w1.weight" for layer in (0, 1) for expert in (0, 1)]
    weights = {"embed.weight": torch.ones(6, 4), "norm.weight": torch.ones(4), **{n: torch.ones(4, 4) for n in names}}
    faults = list(check_sync.malformed(weights))
    assert [(fault.what, fault.name) for fault in faults] == [
        ("without", "layers.1.experts.1.w1.weight"),
        ("without", "embed.weight"),
        ("without", "norm.weight"),
        ("with a surplus", "embed.surplus"),
        *[
            (what, name)
            for name in ("layers.1.experts.1.w1.weight", "embed.weight")
            for what in ("with two rows missing in", "with two rows too many in", "with integers in")
        ],
    ]
    for fault in faults:
        differing = {
            name
            for name in weights.keys() | fault.weights.keys()
            if name not in weights
            or name not in fault.weights
            or (weights[name].dtype, weights[name].shape) != (fault.weights[name].dtype, fault.weights[name].shape)
        }
        assert differing == {fault.name}


def quantized(model: Path) -> Path:
    """The same with linear layers of 8-bit integers, as llm-compressor writes them."""
    from safetensors.torch import save_file

    tensors = checkpoint(model)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (model / "config.json").write_text(json.dumps(config))
    return model
