"""A policy-gradient loop: sample from servers that follow by themselves, reward digits, take a step, publish."""

import argparse

import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from urllib3.util import Retry
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

from tensorhub_plugins.vllm.weight_transfer import CheckpointSource, FollowingEngines, TensorHubTrainerInitInfo

PROMPTS = ["1 + 1 = ", "2 * 3 = ", "7 - 4 = ", "9 + 5 = "]
SAMPLES, TOKENS = 8, 8  # for each prompt, from one server
PATIENCE = Retry(total=None, connect=600, backoff_factor=0.2, backoff_max=0.5)  # a server may still be starting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
    store = WeightTransferTrainerFactory.trainer_init(init, client=FollowingEngines(), source=CheckpointSource(model))
    with requests.Session() as http:
        http.mount("http://", requests.adapters.HTTPAdapter(max_retries=PATIENCE))
        store.send_weights()  # version 1: what the servers start from
        for step in range(options.steps):
            server = options.servers[step % len(options.servers)]
            request = {"model": "actor", "prompt": PROMPTS, "n": SAMPLES, "max_tokens": TOKENS, "ignore_eos": True}
            reply = http.post(f"{server}/v1/completions", json={**request, "return_token_ids": True}, timeout=300)
            choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
            prompts = [torch.tensor(choice["prompt_token_ids"]) for choice in choices[::SAMPLES]]
            answers = torch.tensor([choice["token_ids"] for choice in choices]).split(SAMPLES)
            rewards = torch.stack([torch.isin(answer, digits).float().mean(-1) for answer in answers])
            loss = 0.0
            for prompt, answer, reward in zip(prompts, answers, rewards, strict=True):
                logits = model(torch.cat([prompt.expand(SAMPLES, -1), answer], 1)).logits[:, len(prompt) - 1 : -1]
                logprobs = logits.float().log_softmax(-1).gather(-1, answer[..., None]).squeeze(-1).sum(-1)
                loss = loss - ((reward - reward.mean()) * logprobs).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            store.send_weights()
            print(f"step {step}: sampled from {server}, reward {rewards.mean():.3f}", flush=True)
        for server in options.servers:  # late servers must find the last version
            http.get(f"{server}/health", timeout=300)
    store.shutdown()


if __name__ == "__main__":
    main()
