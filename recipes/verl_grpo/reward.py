"""The reward: the share of the answer that is digits, and a little more if it begins with the right sum.

The first part is dense, so that a model with random weights has something to climb from the first step on. The second
is small, because it is mostly luck at first: at its full weight it would be what the advantages are made of.
"""

RIGHT = 0.2


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    answer = solution_str.strip()
    digits = sum(character.isdigit() for character in answer) / max(1, len(answer))
    return digits + (RIGHT if answer.startswith(ground_truth) else 0.0)
