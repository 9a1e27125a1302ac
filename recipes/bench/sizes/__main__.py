"""What each worker of a tensor parallel engine reads of a checkpoint, from configurations alone: no weights, no GPU.

    python -m recipes.bench.sizes [--tp 1,2,4,8]

vLLM's own classes and loaders on the meta device (tensorhub_plugins/vllm/doctor/slices.py). `needed`: what a worker's
plan names, and what it keeps in host memory while a version arrives. `read`: the segments that hold a byte of it, which
is what it fetches, from a trainer that publishes matrices slice by slice (`Publisher(slices=TP)`); `of whole matrices`:
from one that does not. All of the first rank, as parts of the checkpoint; from the first version on.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {  # what shapes depend on, of their config.json
    "Qwen2.5-7B": ("Qwen2", (3584, 18944, 28, 28, 4, 152064), {}),
    "Phi-3-medium": ("Phi3", (5120, 17920, 40, 40, 10, 32064), {}),  # q, k and v are one tensor, gate and up another
    "Llama-3-70B": ("Llama", (8192, 28672, 80, 64, 8, 128256), {}),
    "Qwen3-30B-A3B": ("Qwen3Moe", (2048, 6144, 48, 32, 4, 151936), {**QWEN3_MOE, "moe_intermediate_size": 768}),
    "Qwen3-235B-A22B": ("Qwen3Moe", (4096, 12288, 94, 64, 4, 151936), {**QWEN3_MOE, "moe_intermediate_size": 1536}),
}
FIGURES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tp", default="1,2,4,8", help="sizes of the tensor parallel group (default: %(default)s)")
    arguments.add_argument("--models", default=",".join(MODELS), help="which of them (default: all)")
    given = arguments.parse_args()
    sizes = [int(size) for size in given.tp.split(",")]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print("| model | engine | checkpoint, GB | needed, GB | needed | read, GB | read | of whole matrices |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in given.models.split(","):
        family, figures, more = MODELS[name]
        settings = {**dict(zip(FIGURES, figures, strict=True)), **more}
        possible = [size for size in sizes if settings["num_attention_heads"] % size == 0]
        table(name, family, settings, possible, expert_parallel=False)
        if "num_experts" in settings:
            table(name, family, settings, [size for size in possible if size > 1], expert_parallel=True)


def table(name: str, family: str, settings: dict[str, int], sizes: list[int], *, expert_parallel: bool) -> None:
    import transformers

    from tensorhub_plugins.vllm.doctor.ranks import Rank
    from tensorhub_plugins.vllm.doctor.slices import shapes_of_config, shares

    kind = getattr(transformers, f"{family}Config")
    config = kind(**settings, architectures=[f"{family}ForCausalLM"], tie_word_embeddings=False, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        ranks = [Rank(size, 0) for size in sizes]
        how = {"enable_expert_parallel": expert_parallel}
        for share in shares(Path(folder), shapes_of_config(config), ranks, **how):
            sizes_bytes = (share.needed, share.read, share.read_of_whole)
            needed, read, of_whole = ([f"{size / 1e9:.1f}", f"{size / share.checkpoint:.1%}"] for size in sizes_bytes)
            engine = f"TP {share.rank.tp_size}{', EP' if expert_parallel else ''}"
            figures = [engine, f"{share.checkpoint / 1e9:.1f}", *needed, *read, of_whole[1]]
            print("|", " | ".join([name, *figures]), "|", flush=True)


if __name__ == "__main__":
    main()
