"""Tiny random models of every architecture that vLLM knows, made on the spot: nothing is downloaded.

A family is made by the class of transformers that has the architecture's name. Of `SHAPE` it takes what its
configuration knows, in every part of the configuration; `FAMILIES` says what it needs beyond. Where vLLM has a name of
its own, `like` says whose checkpoint it reads. Every tensor is random, norms and biases too: ones and zeros would hide
one that was not updated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 500  # not a multiple of 64: vLLM pads it
DIMENSIONS_MAX = 50_000_000  # elements of a model; more is a configuration that does not take SHAPE

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
UNSET: Any = object()  # in the settings of a family: leave it as its configuration has it


@dataclass(frozen=True)
class Family:
    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the configuration, beyond SHAPE
    like: str = ""  # the class of transformers; empty: called as the architecture
    engine: Mapping[str, Any] = field(default_factory=dict)  # options of vllm.LLM


def family(architecture: str) -> Family | None:
    """None: nothing here makes it."""
    import transformers

    if architecture in FAMILIES:
        return FAMILIES[architecture]
    return Family(architecture) if getattr(transformers, architecture, None) is not None else None


def make(of: Family, folder: Path) -> int:
    """Save configuration and weights; how many elements they have. Raises what transformers raises."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = getattr(transformers, of.like or of.architecture)
    config = configuration(kind.config_class, of.settings)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > DIMENSIONS_MAX:
        raise ValueError(f"{count / 1e6:.0f} million elements: the settings of this family make it too large")
    torch.manual_seed(1)
    model = kind(config)
    randomize(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    _set_architecture(folder / "config.json", of.architecture)
    tokenizer(folder)
    return count


def tokenizer(folder: Path, special: Sequence[str] = ()) -> None:
    """Save one that knows VOCABULARY words, w0 and so on; the last of them are special tokens of these names."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{n}" for n in range(4, VOCABULARY - len(special))), *special]
    whole = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, **named, additional_special_tokens=list(special))
    fast.save_pretrained(folder)


def configuration(kind: Any, settings: Mapping[str, Any]) -> Any:
    """One of this class with SHAPE, and with the settings, which may hold those of parts by their names."""
    default = kind()
    values = {key: value for key, value in SHAPE.items() if hasattr(default, key)}
    parts = {}
    for name, part in getattr(kind, "sub_configs", {}).items():
        given = settings.get(name, {})
        parts[name] = given if not isinstance(given, Mapping) else configuration(_kind(default, name, part), given)
    values = {**values, **{key: value for key, value in settings.items() if key not in parts}}
    return kind(**{key: value for key, value in values.items() if value is not UNSET}, **parts)


def _kind(default: Any, name: str, part: Any) -> Any:
    """A configuration says AutoConfig where a part may be of many classes."""
    return type(getattr(default, name)) if part.__name__ == "AutoConfig" else part


def randomize(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_floating_point():
                continue
            if tensor.dim() < 2:
                tensor.normal_(mean=1.0, std=0.2)
            else:  # large enough that other weights give other answers
                tensor.normal_(std=min(0.3, 2 / math.sqrt(tensor.shape[-1])))


def _set_architecture(config: Path, architecture: str) -> None:
    import json

    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "architectures": [architecture]}))


def _families(*families: Family) -> dict[str, Family]:
    return {family.architecture: family for family in families}


MAMBA2 = {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 64}
TWO_KINDS = {"layer_types": ["linear_attention", "full_attention"]}

TIED = {"tie_word_embeddings": True}

FAMILIES = _families(
    Family("BloomForCausalLM", TIED),
    Family("GPTBigCodeForCausalLM", TIED),
    Family("GemmaForCausalLM", TIED),
    Family("OPTForCausalLM", {"ffn_dim": 256, "word_embed_proj_dim": 128, **TIED}),
    Family(
        "DbrxForCausalLM",
        {
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "num_key_value_heads": UNSET,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    Family("FalconForCausalLM", {"head_dim": UNSET, "new_decoder_architecture": True, "num_kv_heads": 2}),
    Family(
        "Gemma3nForCausalLM",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
            "intermediate_size": [256] * 4,
            "tie_word_embeddings": True,
        },
    ),
    Family("Gemma4ForCausalLM", {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 32}),
    Family("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    Family("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    Family(
        "LongcatFlashForCausalLM",
        {
            "num_layers": 1,
            "num_hidden_layers": 2,
            "ffn_hidden_size": 256,
            "expert_ffn_hidden_size": 64,
            "zero_expert_num": 2,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
    ),
    Family("Mamba2ForCausalLM", MAMBA2),
    Family("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8}),
    Family("Qwen3NextForCausalLM", TWO_KINDS),
    Family("Qwen3_5ForCausalLM", TWO_KINDS),
    Family("Qwen3_5MoeForCausalLM", TWO_KINDS),
    Family("OlmoHybridForCausalLM", TWO_KINDS),
    Family(
        "Zamba2ForCausalLM",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "num_key_value_heads": 4,
            "head_dim": UNSET,
        },
    ),
)
