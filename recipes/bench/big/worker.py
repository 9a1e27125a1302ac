"""One worker that installs two versions: python -m recipes.bench.big.worker KIND GB TP. Prints its figures as JSON."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

LAYER_GB = {"dense": 0.134, "moe": 0.318}


def main(kind: str, gb: float, tp: int) -> None:
    import transformers
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from recipes.bench.sizes.ranks import Rank, made
    from recipes.bench.sizes.slices import planned, shapes_of_config
    from tensorhub_plugins.vllm.worker import cpu
    from tensorhub_plugins.vllm.worker.conversion import Conversion

    torch.set_num_threads(1)
    heads: dict[str, Any] = {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32_000,
        "head_dim": 128,
    }
    common = {**heads, "num_hidden_layers": max(round(gb / LAYER_GB[kind]), 1), "dtype": "bfloat16"}
    config: Any = transformers.LlamaConfig(**common, hidden_size=2048, intermediate_size=8192)
    config.architectures = ["LlamaForCausalLM"]
    if kind == "moe":
        experts = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(**common, hidden_size=1024, intermediate_size=2048, **experts)
        config.architectures = ["Qwen3MoeForCausalLM"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        with (
            made(Path(folder), Rank(tp, 0), device="cpu") as (model, vllm_config),
            cpu.live_layers(),
            torch.no_grad(),
        ):
            for parameter in model.parameters():
                parameter.zero_()
            process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
            plan = planned(model, vllm_config, shapes_of_config(config))
            conversion = Conversion(model, vllm_config)
            figures = {"gb": plan.checkpoint_bytes / 1e9, "slice_gb": plan.needed_bytes / 1e9}
            for name, seed in (("first", 1), ("later", 2)):
                given = fetched(plan, seed)
                with Memory() as memory:
                    conversion.install(given)
                figures[f"{name}_s"] = memory.seconds
                if name == "first":
                    figures["fresh"] = memory.fresh_bytes / plan.needed_bytes
                    figures["peak"] = memory.peak_bytes / plan.needed_bytes
            figures["memcpy_s"] = memcpy_s(plan.needed_bytes)
    print(json.dumps(figures))


def fetched(plan: Any, seed: int) -> Any:
    """Return a version of which only what the plan needs is here."""
    from tensorhub_plugins.vllm.worker.plan import Given, Held

    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed))
    held = {}
    for number, (name, regions) in enumerate(plan.needed.items()):
        dtype, _ = plan.shapes[name]
        pieces = []
        for region in regions:
            tensor = torch.empty(region.shape, dtype=dtype)
            for k, part in enumerate(torch.split(tensor.view(-1), len(block) // 2)):
                first = (number + k) % 1000 * 7
                part.copy_(block[first : first + len(part)])
            pieces.append(Held(region, tensor))
        held[name] = tuple(pieces)
    return Given(held, plan.shapes, plan=plan)


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
