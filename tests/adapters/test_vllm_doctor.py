"""`tensorhub doctor check-sync` on every kind of model that vLLM's CPU build runs; what it cannot run is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import Engine, EngineError, checkpoint, make_model

from tensorhub_plugins.vllm import doctor

pytestmark = pytest.mark.heavy


class Patient:
    """An engine of the tests', as the doctor wants it."""

    def __init__(self, folder: Path, extra: dict[str, Any], **options: Any) -> None:
        settings = {**doctor.engine_options(extra), "kv_cache_memory_bytes": 64 << 20, **options}
        self.engine = Engine(folder, extension=settings.pop("worker_extension_cls"), **settings)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self.engine.ask("rpc", method, args))

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return self.engine.generate(prompts, tokens)

    def close(self) -> None:
        self.engine.close()


def examine(model: Path, **options: Any) -> list[doctor.Finding]:
    return list(doctor.check_sync(model, lambda folder, extra: Patient(folder, extra, **options)))


KINDS = ("qwen2-tied", "qwen2-untied", "llama", "qwen3", "gemma", "mixtral", "qwen3-moe", "deepseek-mla")
QUICK = ("qwen2-untied", "mixtral")  # the others are behind `make test-vllm`


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.long) for k in KINDS])
def test_a_synced_model_equals_a_fresh_one(kind: str, tmp_path: Path) -> None:
    findings = examine(make_model(kind, tmp_path, 1))
    assert [finding.wrong for finding in findings] == [""] * 5, findings
    assert "tensors and 4 answers are equal" in findings[0].what


def test_the_doctor_notices_a_sync_that_forgets_a_tensor(tmp_path: Path) -> None:
    """The negative control of the test above."""
    model = make_model("qwen2-untied", tmp_path, 1)
    findings = examine(model, worker_extension_cls="vllm_faults.ForgetfulPatient")
    assert [bool(finding.wrong) for finding in findings] == [False, False, False, False, True]
    assert findings[-1].wrong == "1 tensors differ, first model.norm.weight"


@pytest.mark.long
def test_a_quantized_model_runs_on_a_cpu_and_is_refused_there(tmp_path: Path) -> None:
    """The CPU build packs quantized weights where no update would be seen."""
    model = quantized(make_model("llama", tmp_path, 1))
    with Engine(model, extension=doctor.EXTENSION) as plain:
        assert len(plain.generate()[0]) > 0
    with pytest.raises(EngineError, match="on the CPU build of vLLM tensorhub updates unquantized models only"):
        examine(model)


def quantized(model: Path) -> Path:
    """The same with linear layers of 8-bit integers, as llm-compressor writes them."""
    import torch
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
