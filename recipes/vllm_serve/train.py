"""A policy-gradient loop in plain PyTorch: sample from the servers, reward digits, take a step, publish the weights.

The servers follow by themselves; nobody tells them anything. README.md has the commands.
"""

import argparse
import time

import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from tensorhub_plugins.vllm.transfer import FollowingEngines, TensorHubTrainerInitInfo

PROMPTS = ["1 + 1 = ", "2 * 3 = ", "7 - 4 = ", "9 + 5 = "]
SAMPLES, TOKENS = 8, 8  # for each prompt, from one server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--hub", required=True)
    parser.add_argument("--servers", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = torch.tensor(AutoTokenizer.from_pretrained(options.model).convert_tokens_to_ids(list("0123456789")))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    init = TensorHubTrainerInitInfo(hub=options.hub, model="actor", rank=0)
    store = WeightTransferTrainerFactory.trainer_init(init, client=FollowingEngines(), source=ModuleSource(model))
    store.send_weights()  # version 1: what the servers start from
    for step in range(options.steps):
        server = options.servers[step % len(options.servers)]
        wait_for(server)
        loss = reward = 0.0
        for prompt, answers in sample(server):
            sequences = torch.tensor([prompt + answer for answer in answers])
            taken = sequences[:, len(prompt) :]
            logits = model(sequences).logits[:, len(prompt) - 1 : -1].float()
            logprobs = logits.log_softmax(-1).gather(-1, taken[..., None]).squeeze(-1).sum(-1)
            rewards = torch.isin(taken, digits).float().mean(-1)
            loss = loss - ((rewards - rewards.mean()) * logprobs).mean()
            reward += rewards.mean().item() / len(PROMPTS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        store.send_weights()
        print(f"step {step}: sampled from {server}, reward {reward:.3f}", flush=True)
    wait_for(*options.servers)  # whoever joins late shall find the last version
    store.shutdown()


def sample(server: str) -> list[tuple[list[int], list[list[int]]]]:
    """Token ids of every prompt, and of the answers to it."""
    request = {"model": "actor", "prompt": PROMPTS, "n": SAMPLES, "max_tokens": TOKENS, "ignore_eos": True}
    reply = requests.post(f"{server}/v1/completions", json={**request, "return_token_ids": True}, timeout=300)
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    groups = [choices[k : k + SAMPLES] for k in range(0, len(choices), SAMPLES)]
    return [(group[0]["prompt_token_ids"], [choice["token_ids"] for choice in group]) for group in groups]


def wait_for(*servers: str, deadline_s: float = 300.0) -> None:
    end = time.monotonic() + deadline_s
    for server in servers:
        while True:
            try:
                requests.get(f"{server}/health", timeout=5).raise_for_status()
                break
            except requests.RequestException:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)


if __name__ == "__main__":
    main()
