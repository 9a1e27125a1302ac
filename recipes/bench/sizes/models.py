"""The models of the table, as far as shapes depend on it, and the machines that they are trained and served on."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from recipes.bench.sizes.ranks import Rank, made
from recipes.bench.sizes.slices import planned, read_of, shapes_of_config
from tensorhub_plugins.core import TensorTable
from tensorhub_plugins.vllm.worker.plan import Plan

Value = TypeVar("Value")
LAYER = re.compile(r"(?P<before>.*\blayers\.)(?P<number>\d+)(?P<after>\..*)")
FIGURES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class Model:
    """A model of the table. family: its class in transformers. figures: see FIGURES. unlike: how many layers at the
    beginning differ from all others. ranks: its trainer's. tp: sizes of its engines in the table. ep: of those whose
    ranks have whole experts (`--enable-expert-parallel`), and slices of all else. dp: of those whose ranks have all
    else whole."""

    family: str
    figures: tuple[int, ...]
    ranks: int
    tp: tuple[int, ...]
    ep: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    unlike: int = 0
    more: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        return self.figures[FIGURES.index("num_hidden_layers")]

    def config(self, layers: int) -> Any:
        """Return transformers' configuration of the same model with so many layers."""
        import transformers

        settings = {**dict(zip(FIGURES, self.figures, strict=True)), **self.more, "num_hidden_layers": layers}
        kind = getattr(transformers, f"{self.family}Config")
        architectures = [f"{self.family}ForCausalLM"]
        return kind(**settings, architectures=architectures, tie_word_embeddings=False, dtype="bfloat16")


MODELS = {
    "Qwen2.5-7B": Model("Qwen2", (3584, 18944, 28, 28, 4, 152064), ranks=8, tp=(1, 2, 4)),
    "Llama-3-70B": Model("Llama", (8192, 28672, 80, 64, 8, 128256), ranks=32, tp=(4, 8)),
    "Qwen3-235B-A22B": Model(
        "Qwen3Moe",
        (4096, 12288, 94, 64, 4, 151936),
        ranks=64,
        tp=(8,),
        ep=(8,),
        dp=(8,),
        more={
            **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1},
            "moe_intermediate_size": 1536,
        },
    ),
    # All else is its configuration's own defaults, which are those of V3.
    "DeepSeek-V3": Model(
        "DeepseekV3",
        (7168, 18432, 61, 128, 128, 129280),
        ranks=256,
        tp=(16,),
        ep=(16,),
        dp=(16,),
        unlike=3,
        more={"topk_method": "noaux_tc"},
    ),
}


@dataclass(frozen=True)
class Worker:
    """One rank of an engine. holds_bytes: of everything that it runs, which is what its peers read."""

    plan: Plan
    holds_bytes: int

    def reads(self, table: TensorTable) -> int:
        """Return the bytes that it fetches of a shard with this table."""
        return read_of(self.plan, table)


def worker_of(model: Model, rank: Rank, *, experts: bool = False) -> Worker:
    """Plan for one rank. experts: it has whole ones. Call it in a process of its own, see ranks.py. Layers that are
    alike are planned once: vLLM's loaders search all experts for each tensor of one, and 94 layers of 128 take minutes.
    """
    few = min(max(model.unlike, 1) + 2, model.layers)  # the first one has what all of them share
    config = model.config(few)
    with _folder(config) as folder, made(folder, rank, enable_expert_parallel=experts) as (module, vllm_config):
        found = planned(module, vllm_config, shapes_of_config(config))
        tensors = [*module.named_parameters(), *module.named_buffers()]
    sizes = deepened({name: tensor.nbytes for name, tensor in tensors}, few, model.layers)
    return Worker(deepened_plan(found, few, model.layers), sum(sizes.values()))


@contextmanager
def _folder(config: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        yield Path(folder)


def deepened_plan(plan: Plan, few: int, layers: int) -> Plan:
    """Return the same plan for a model with so many layers, without its pieces, on which no byte count depends."""
    shapes, needed = deepened(plan.shapes, few, layers), deepened(plan.needed, few, layers)
    return replace(plan, shapes=shapes, needed=needed, pieces=())


def deepened(named: Mapping[str, Value], few: int, layers: int) -> dict[str, Value]:
    """Return values by name for a model with so many layers, from one with `few` of them; all others equal its last
    one.

    ValueError if the last two of those are not alike.
    """
    by_layer: dict[int, dict[str, Value]] = {}
    for name, value in named.items():
        if found := LAYER.fullmatch(name):
            by_layer.setdefault(int(found["number"]), {})[f"{found['before']}{{}}{found['after']}"] = value
    last = by_layer.get(few - 1, {})
    if layers > few and (not last or last != by_layer.get(few - 2)):
        raise ValueError(f"layers {few - 2} and {few - 1} are not alike: say how many are not (`unlike`)")
    more = {name.format(layer): value for layer in range(few, layers) for name, value in last.items()}
    return {**named, **more}
