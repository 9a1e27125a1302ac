"""The reward: the share of the answer that is digits. Dense, so that a model with random weights has something to
climb from the first step on. OpenRLHF calls reward_func with one text at a time."""

import torch

SPECIAL = ("<eos>", "<pad>", "<bos>")


def reward_func(queries, prompts, labels, **_):
    rewards = []
    for query, prompt in zip(queries, prompts, strict=True):
        for token in SPECIAL:
            query = query.replace(token, "")
        answer = query.replace(" ", "")[len(prompt.replace(" ", "")) :]
        rewards.append(sum(character.isdigit() for character in answer) / max(1, len(answer)))
    values = torch.tensor(rewards)
    return {"rewards": values, "scores": values, "extra_logs": {}}
