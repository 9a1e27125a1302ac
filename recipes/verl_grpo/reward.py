"""The reward: the share of the answer that is digits, and one more if it begins with the right sum.

The first part is dense, so that a model with random weights has something to climb from the first step on.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    answer = solution_str.strip()
    digits = sum(character.isdigit() for character in answer) / max(1, len(answer))
    return digits + (1.0 if answer.startswith(ground_truth) else 0.0)
