"""Make a Qwen2 model with random weights, and its tokenizer, without a network: make_model.py FOLDER --size SIZE.

tiny   about 0.1 million parameters, for tests
small  about 35 million parameters, 69 MB in bfloat16: big enough that moving the weights costs something
deep   about 6 million parameters in 24 layers and 291 tensors, as Qwen2-0.5B has them: moving each costs something

One token a character: with so few tokens a random model learns to answer digits within a handful of steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

# Heads are 32 or 64 wide: vLLM's CPU attention takes no other small sizes. `small` is wide and shallow, because on
# two cores the time to generate a token is mostly the number of layers.
SIZES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "small": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "deep": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
CONTEXT_MAX = 2048


def make_tokenizer() -> PreTrainedTokenizerFast:
    # verl's chat template code wants "\n" and "<|im_end|>" as single special tokens.
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "<|im_end|>"]
    vocabulary = {text: i for i, text in enumerate(special + [chr(code) for code in range(32, 127)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["\n", "<|im_end|>"]})
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def make_model(size: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        # Exactly the tokenizer's: with spare rows in the head, the rollout could draw tokens that training masks.
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT_MAX,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        **SIZES[size],
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(arguments.size, tokenizer, arguments.seed)
    tokenizer.save_pretrained(arguments.folder)
    model.save_pretrained(arguments.folder)
    count = sum(p.numel() for p in model.parameters())
    print(f"{arguments.folder}: {count:,} parameters, {2 * count / 1e6:.1f} MB in bfloat16")


if __name__ == "__main__":
    main()
