"""FP8 in blocks with a scale each, made on the device from the bfloat16 that a trainer publishes; and a layer whose
kernel remembers the tensor of its scale, as vLLM's experts do."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tensorhub_plugins.core import gate

BLOCK = 128
FP8_MAX = 448.0


def quantized(weight: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn of the same shape, float32[rows / block, columns / block] to multiply it with) of a matrix whose
    sides are multiples of `block`, where the matrix lies."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // block, block, columns // block, block)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / FP8_MAX
    scaled = blocks / scale[:, None, :, None]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(rows, columns), scale


def fp8_experts(folder: Path, *, experts: int, width: int, layers: int = 2) -> Path:
    """Save a Qwen3 mixture of experts with random weights, whose checkpoint is FP8 by blocks as DeepSeek's and Qwen's
    own are: Qwen3-30B-A3B has 128 experts of width 2048, and 48 layers."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=8000, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, head_dim=128, num_experts=experts,
        num_experts_per_tok=min(8, experts // 2), moe_intermediate_size=3 * BLOCK * max(1, width // 1024),
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    made: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if not name.endswith("_proj.weight"):
                made[name] = tensor
                continue
            made[name], made[f"{name}_scale_inv"] = quantized(tensor)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
    return folder


class Fp8Layer(torch.nn.Module):
    """weight: float8_e4m3fn[size, size] with weight_scale: float32[blocks, blocks], loaded as they are."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        made = quantized(torch.ones(size, size, device=device))
        for name, tensor in zip(("weight", "weight_scale"), made, strict=True):
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            parameter.weight_loader = self._load  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    @staticmethod
    def _load(parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        """As vLLM's: without a look at the dtype."""
        parameter.data.copy_(loaded)

    def load_weights(self, weights: Any) -> set[str]:
        names = set()
        for name, loaded in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, loaded)
            names.add(name)
        return names


class Remembering:
    """A layer whose kernel remembers the tensor of its scale. A step multiplies both; captured, and eager."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.weight, self.scale = (torch.zeros(size, device=device) for _ in range(2))
        self.kernel = SimpleNamespace(config={"w1": (self.scale, 1)})
        self.output = torch.zeros(size, device=device)
        self._graph: Any = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def reload(self, weight: torch.Tensor, scale: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As vLLM does it: loaded and packed in new memory, from which the kernel is made; then copied into the layer's
        own tensors, which are put back. Returns the pairs (new memory, own) that were exchanged."""
        made = {"weight": weight.clone(), "scale": scale.clone()}
        self.kernel = SimpleNamespace(config={"w1": (made["scale"], 1)})
        pairs = []
        for name, new in made.items():
            own = getattr(self, name)
            own.copy_(new)
            pairs.append((new, own))
        return pairs

    def _compute(self) -> None:
        torch.mul(self.weight, self.kernel.config["w1"][0], out=self.output)

    def capture(self) -> None:
        """With what the kernel has now."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._compute()
        torch.cuda.synchronize()
        gate.close()
        try:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="global"):
                self._compute()
        finally:
            gate.open()

    def step(self, *, eager: bool) -> list[float]:
        """What one step computes, on the host."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if eager or self._graph is None:
                self._compute()
            else:
                self._graph.replay()
        if self._stream is not None:
            torch.cuda.synchronize()
        found: list[float] = self.output.tolist()
        return found
