"""TRL's AsyncGRPOTrainer as a user writes it, with one argument of ours: it rewards answers in digits."""

import argparse

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from tensorhub_plugins.vllm.trl import StoreTransfer

PROMPTS = ["1 + 1 = ", "2 * 3 = ", "7 - 4 = ", "9 + 5 = "]


def reward_digits(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """Return the share of digits in each answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter in "0123456789" for letter in text) / max(len(text), 1) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--hub", required=True)
    parser.add_argument("--servers", nargs="+", required=True, help="base URLs; TRL samples from the first one")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    settings = AsyncGRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        learning_rate=2e-3,
        dtype="bfloat16",
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=8,
        token_budget=256,
        vllm_server_base_url=options.servers[0],
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    trainer = AsyncGRPOTrainer(
        options.model,
        args=settings,
        reward_funcs=reward_digits,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROMPTS] * 64}),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        weight_transfer=StoreTransfer(options.hub, options.model, servers=options.servers),
    )
    trainer.train()


if __name__ == "__main__":
    main()
