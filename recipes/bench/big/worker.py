"""One worker that installs two versions: python -m recipes.bench.big.worker KIND GB TP. Prints its figures as JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LAYER_GB = {"dense": 0.134, "moe": 0.318, "fp8": 0.151, "fp8-moe": 0.210}
BLOCK = [128, 128]  # numbers that have one scale
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK}


def main(kind: str, gb: float, tp: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        device = os.environ.get("DEVICE", "cpu")
        if kind == "fp8":
            install_twice(*quantized(Path(folder), gb, tp, device))
            return
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        from recipes.bench.sizes.ranks import Rank, made
        from recipes.bench.sizes.slices import shapes_of_config
        from tensorhub_plugins.vllm.worker import cpu

        config = of_transformers(kind, round(gb / LAYER_GB[kind]) or 1)
        shapes = shapes_of_config(config)
        if kind == "fp8-moe":
            shapes = in_blocks(shapes)
            config.quantization_config = FP8
            if device == "cpu":
                from vllm.model_executor.layers.quantization import fp8

                fp8.init_fp8_linear_kernel = lambda **settings: Kernel()  # type: ignore[assignment]
        config.save_pretrained(folder)
        with made(Path(folder), Rank(tp, 0), device=device) as (model, vllm_config), cpu.live_layers():
            for parameter in model.parameters():
                parameter.zero_()
            process_weights_after_loading(model, vllm_config.model_config, torch.device(device))
            install_twice(model, vllm_config, shapes)


def in_blocks(shapes: Any) -> dict[str, Any]:
    """Return the shapes of a checkpoint in FP8 with a scale for each block, as DeepSeek's and Qwen's are."""
    made: dict[str, Any] = {}
    for name, (dtype, shape) in shapes.items():
        is_quantized = name.endswith("_proj.weight")
        made[name] = (torch.float8_e4m3fn if is_quantized else dtype), shape
        if is_quantized:
            blocks = [-(-size // block) for size, block in zip(shape, BLOCK, strict=True)]
            made[f"{name}_scale_inv"] = torch.float32, torch.Size(blocks)
    return made


def install_twice(model: Any, vllm_config: Any, shapes: Any) -> None:
    """Install two versions of a checkpoint of these shapes, of which what the plan needs is here, and print figures."""
    from recipes.bench.sizes.slices import planned
    from tensorhub_plugins.vllm.worker.conversion import Conversion
    from tensorhub_plugins.vllm.worker.quantize import Quantizer

    quantizer, conversion = Quantizer(model, vllm_config), Conversion(model, vllm_config)
    plan = quantizer.plan(shapes, lambda known: planned(model, vllm_config, known))
    wanted = quantizer.wanted(plan)
    figures = {"gb": sum(dtype.itemsize * shape.numel() for dtype, shape in shapes.values()) / 1e9}
    figures["slice_gb"] = wanted.size_bytes / 1e9
    for name, seed in (("first", 1), ("later", 2)):
        given = quantizer.given(fetched(wanted, shapes, seed))
        given.plan = plan
        with Memory() as memory, Passes() if os.environ.get("COUNT") else nullcontext() as passes:
            conversion.install(given)
        figures |= {f"{name}_s": memory.seconds, f"{name}_fresh": memory.fresh_bytes / wanted.size_bytes}
        figures[f"{name}_peak"] = memory.peak_bytes / wanted.size_bytes
        if passes is not None:
            figures[f"{name}_passes"] = passes.size_bytes / wanted.size_bytes
        del given
    at_once = min(wanted.size_bytes, 1 << 30)
    figures["memcpy_s"] = memcpy_s(at_once) * wanted.size_bytes / at_once
    print(json.dumps(figures))


def of_transformers(kind: str, layers: int) -> Any:
    import transformers

    common: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32_000}
    common |= {"head_dim": 128, "num_hidden_layers": layers, "dtype": "bfloat16"}
    if kind == "dense":
        config: Any = transformers.LlamaConfig(**common, hidden_size=2048, intermediate_size=8192)
        config.architectures = ["LlamaForCausalLM"]
        return config
    width = 1024 if kind == "fp8-moe" else 768  # each of 8 ranks has whole blocks
    experts = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": width, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(**common, hidden_size=1024, intermediate_size=2048, **experts)
    config.architectures = ["Qwen3MoeForCausalLM"]
    return config


class Kernel:
    """Reads the scales that it remembers, as vLLM's do; a CPU has no such kernel."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self.scale = layer.weight_scale_inv.data


class Layers(torch.nn.Module):
    def load_weights(self, weights: Any) -> set[str]:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)
        return set(parameters)


def quantized(folder: Path, gb: float, tp: int, device: str) -> tuple[Any, Any, Any]:
    """Return vLLM's own FP8 layers of one rank, the configuration, and the shapes of a checkpoint of floats."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from recipes.bench.sizes.ranks import _described

    config: Any = VllmConfig(device_config=DeviceConfig(device=device))
    config.quant_config = fp8.Fp8Config(True, "dynamic", weight_block_size=BLOCK)
    if device == "cpu":
        fp8.init_fp8_linear_kernel = lambda **settings: Kernel()
    with set_current_vllm_config(config), torch.device(device):
        init_distributed_environment(1, 0, f"file://{folder / 'meeting'}", 0, "gloo")
        initialize_model_parallel(1, 1)
        parallel_state._TP = _described(parallel_state._TP, tp, 0)
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, quantization="fp8")
        model, shapes = Layers(), {}
        for number in range(round(gb / LAYER_GB["fp8"]) or 1):
            for name, kind, of in (
                ("up", ColumnParallelLinear, (4096, 9216)),
                ("down", RowParallelLinear, (9216, 4096)),
            ):
                called = f"{name}{number}"
                layer = kind(*of, bias=False, quant_config=config.quant_config, prefix=called)
                setattr(model, called, layer)
                shapes[f"{called}.weight"] = torch.bfloat16, torch.Size(reversed(of))
        for parameter in model.parameters():
            parameter.data.zero_()
        record_metadata_for_reloading(model)
        for layer in model.children():
            layer.quant_method.process_weights_after_loading(layer)
    return model, config, shapes


def fetched(wanted: Any, shapes: Any, seed: int) -> Any:
    """Return a version of which only what is wanted is here."""
    from tensorhub_plugins.vllm.worker.plan import Given, Held, Region, whole_region

    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed))
    held: dict[str, tuple[Any, ...]] = {}
    for number, spec in enumerate(wanted):
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for k, part in enumerate(torch.split(tensor.view(-1), len(block) // 2)):
            first = (number + k) % 1000 * 7
            part.copy_(block[first : first + len(part)])
        region = whole_region(spec.shape) if spec.part is None else Region(spec.part.start, spec.shape)
        held[spec.tensor] = (*held.get(spec.tensor, ()), Held(region, tensor))
    return Given(held, shapes)


class Passes(TorchDispatchMode):
    """Counts the bytes that copies write, and that digests and comparisons read; what it costs spoils the seconds."""

    def __enter__(self) -> Passes:
        from tensorhub_plugins.vllm.worker import conversion

        self.size_bytes, original = 0, conversion._digests_of

        def counted(tensor: torch.Tensor) -> bytes:
            self.size_bytes += tensor.nbytes
            return original(tensor)

        conversion._digests_of = counted
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), kwargs: Any = None) -> Any:
        result = function(*given, **(kwargs or {}))
        if function is torch.ops.aten.copy_.default and not result.is_meta:  # vLLM counts elements so
            self.size_bytes += result.nbytes
        elif function is torch.ops.aten.equal.default:
            self.size_bytes += given[0].nbytes
        elif function is torch.ops.aten._foreach_copy_.default:
            self.size_bytes += sum(target.nbytes for target in given[0])
        return result


def memcpy_s(size_bytes: int) -> float:
    source, target = (torch.ones(size_bytes, dtype=torch.uint8) for _ in range(2))
    took = []
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(source)
        took.append(time.perf_counter() - began)
    return min(took)


class Memory:
    """What a block took: seconds, bytes that the kernel handed out, and the most that it held at once."""

    def __enter__(self) -> Memory:
        self.peak_bytes = 0
        self._held_bytes = held_bytes()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        self.fresh_bytes = faults * resource.getpagesize()
        self._ended.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, held_bytes() - self._held_bytes)


def held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
