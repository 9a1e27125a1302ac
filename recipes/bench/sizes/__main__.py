"""What each worker of a tensor parallel engine reads of a checkpoint, from configurations alone: no weights, no GPU.

    python -m recipes.bench.sizes [--tp 1,2,4,8]

vLLM's own classes and loaders on the meta device (tensorhub_plugins/vllm/doctor/slices.py). `needed`: what a worker's
plan names, and what it keeps in host memory while a version arrives. `read`: the segments that hold a byte of it, which
is what it fetches, from a trainer that publishes matrices slice by slice (`Publisher(slices=TP)`); `of whole matrices`:
from one that does not. All of the first rank, as parts of the checkpoint; from the second version on.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

MODELS = {  # the figures of their config.json that shapes depend on
    "Qwen2.5-7B": ("Qwen2", (3584, 18944, 28, 28, 4, 152064)),
    "Phi-3-medium": ("Phi3", (5120, 17920, 40, 40, 10, 32064)),  # q, k and v, gate and up are one tensor each
    "Llama-3-70B": ("Llama", (8192, 28672, 80, 64, 8, 128256)),
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
    sizes = [int(size) for size in arguments.parse_args().tp.split(",")]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print("| model | TP | checkpoint, GB | needed, GB | needed | read, GB | read | of whole matrices |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (family, figures) in MODELS.items():
        settings = dict(zip(FIGURES, figures, strict=True))
        heads = settings["num_attention_heads"]
        table(name, family, settings, [size for size in sizes if heads % size == 0])


def table(name: str, family: str, settings: dict[str, int], sizes: list[int]) -> None:
    import transformers

    from tensorhub_plugins.vllm.doctor.ranks import Rank
    from tensorhub_plugins.vllm.doctor.slices import shapes_of_config, shares

    kind = getattr(transformers, f"{family}Config")
    config = kind(**settings, architectures=[f"{family}ForCausalLM"], tie_word_embeddings=False, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for share in shares(Path(folder), shapes_of_config(config), [Rank(size, 0) for size in sizes]):
            sizes_bytes = (share.needed, share.read, share.read_of_whole)
            needed, read, of_whole = ([f"{size / 1e9:.1f}", f"{size / share.checkpoint:.1%}"] for size in sizes_bytes)
            figures = [str(share.rank.tp_size), f"{share.checkpoint / 1e9:.1f}", *needed, *read, of_whole[1]]
            print("|", " | ".join([name, *figures]), "|", flush=True)


if __name__ == "__main__":
    main()
