"""Tiny random models, made on the spot: nothing is downloaded.

A family is made by the class of transformers that has the architecture's name. Of `SHAPE` it takes what its
configuration knows, in every part of the configuration. Where vLLM has a name of its own, `like` says whose checkpoint
it reads, and what transformers does not know at all is made by hand (naming.py). Every tensor is random, norms
and biases too: ones and zeros would hide one that was not updated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 500  # not a multiple of 64: vLLM pads it
ELEMENTS_MAX = 50_000_000  # elements of a model; more is a configuration that does not take SHAPE

# By the names that configurations use; whichever a configuration has is set.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that the CPU attention takes
    "max_position_embeddings": 256,
    "sliding_window": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    # images: 16 patches
    "image_size": 56,
    "patch_size": 14,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 64,
    "kv_lora_rank": 512,  # with rope 64 the 576 that every MLA back end takes
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
# Of these, what every configuration by hand has.
SHAPE_BY_HAND = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    "tie_word_embeddings",
)
UNSET: Any = "(unset)"  # in the settings of a family: leave it as its configuration has it


@dataclass(frozen=True)
class Family:
    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the configuration, beyond SHAPE
    like: str = ""  # the class of transformers; empty: called as the architecture
    engine: Mapping[str, Any] = field(default_factory=dict)  # options of vllm.LLM
    by_hand: bool = False  # no class of transformers: `settings` are all of config.json, names are derived from vLLM
    packed: Mapping[str, list[str]] = field(default_factory=dict)  # then: what the parts of a fused layer are called
    renames: Mapping[str, str] = field(default_factory=dict)  # beginnings of names that transformers saves otherwise
    special: Mapping[str, str] = field(default_factory=dict)  # tokens for images or sound by what processors call them
    processor: Callable[[Any], Any] | None = None  # of transformers, for images and sound, from the tokenizer


def make(of: Family, folder: Path) -> None:
    """Save configuration, weights and tokenizer. Raises what transformers or vLLM raises."""
    torch.manual_seed(1)
    if of.by_hand:
        _make_by_hand(of, folder)
    else:
        _make_by_transformers(of, folder)
    made = tokenizer(folder, of.special)
    if of.processor is not None:
        of.processor(made).save_pretrained(folder)


def _make_by_transformers(of: Family, folder: Path) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = getattr(transformers, of.like or of.architecture)
    config = configuration(kind.config_class, of.settings)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > ELEMENTS_MAX:
        raise ValueError(f"{count / 1e6:.0f} million elements: the settings of this family make it too large")
    model = kind(config)
    for tensor in [*model.parameters(), *model.buffers()]:
        randomize(tensor)
    model.to(torch.bfloat16).save_pretrained(folder)
    if of.renames:
        _rename(folder / "model.safetensors", of.renames)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, "architectures": [of.architecture]}))


def _make_by_hand(of: Family, folder: Path) -> None:
    from safetensors.torch import save_file

    from recipes.conformance.naming import checkpoint_shapes

    folder.mkdir(parents=True)
    shared = {key: SHAPE[key] for key in SHAPE_BY_HAND}
    values = {"architectures": [of.architecture], "torch_dtype": "bfloat16", **shared, **of.settings}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != UNSET}))
    tokenizer(folder, {})
    shapes = checkpoint_shapes(folder, of.packed)
    weights = {name: randomize(torch.empty(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _rename(file: Path, renames: Mapping[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    weights = {}
    for name, tensor in load_file(file).items():
        old = next((beginning for beginning in renames if name.startswith(beginning)), "")
        weights[renames.get(old, "") + name[len(old) :]] = tensor
    save_file(weights, file, metadata={"format": "pt"})


def randomize(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if tensor.is_floating_point() and tensor.dim() < 2:
            tensor.normal_(mean=1.0, std=0.2)
        elif tensor.is_floating_point():  # large enough that other weights give other answers
            tensor.normal_(std=min(0.3, 2 / math.sqrt(tensor.shape[-1])))
    return tensor


def token_id(special: Mapping[str, str], name: str) -> int:
    return VOCABULARY - len(special) + list(special).index(name)


def tokenizer(folder: Path, special: Mapping[str, str]) -> Any:
    """Save one that knows VOCABULARY words, w0 and so on; the last of them are these special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{n}" for n in range(4, VOCABULARY - len(special)))]
    words += special.values()
    whole = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, **named, extra_special_tokens=dict(special))
    fast.save_pretrained(folder)
    return fast


def configuration(kind: Any, settings: Mapping[str, Any]) -> Any:
    """Return a configuration of this class with SHAPE and the settings, which may hold those of named parts."""
    default = kind()
    values = {key: value for key, value in SHAPE.items() if hasattr(default, key)}
    parts = {}
    for name, part in getattr(kind, "sub_configs", {}).items():
        given = settings.get(name, {})
        parts[name] = given if not isinstance(given, Mapping) else configuration(_kind(default, name, part), given)
    values = {**values, **{key: value for key, value in settings.items() if key not in parts}}
    return kind(**{key: value for key, value in values.items() if value != UNSET}, **parts)


def _kind(default: Any, name: str, part: Any) -> Any:
    """Return the class of a part: a configuration has AutoConfig where it may be one of many."""
    return type(getattr(default, name)) if part.__name__ == "AutoConfig" else part
