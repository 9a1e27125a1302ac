"""Which faults come when: pure, all from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

GAP_S = 1.2  # between two faults, on the average
CALM_S = 6.0  # without new faults, for processes to come up, and at the end

# How often, and how long it lasts (seconds): what is killed starts again after that, what is stopped goes on.
FAULTS: dict[str, tuple[int, float, float]] = {
    "kill rollout": (4, 0.2, 3.0),
    "kill trainer": (2, 0.2, 2.0),
    "kill hub": (2, 0.2, 4.0),
    "stop rollout": (3, 0.3, 9.0),
    "stop trainer": (1, 0.3, 6.0),
    "haunt trainer": (1, 0.0, 0.0),  # a rank stops, the trainer starts again without it, and then it goes on
    "stop hub": (1, 0.3, 5.0),
    "cut host": (2, 0.5, 7.0),
    "cut site": (1, 0.5, 7.0),
    "mute host": (1, 0.5, 7.0),  # nothing leaves it, and it hears all
    "deafen host": (1, 0.5, 7.0),  # nothing comes in, and all hear it
    "flip rollout": (2, 0.0, 0.0),  # a bit of what it serves
    "flip trainer": (1, 0.0, 0.0),
    "strike stranger": (3, 0.0, 0.0),  # rubbish for every port there is
}


@dataclass(frozen=True, order=True)
class Fault:
    at_s: float
    kind: str
    target: str  # a name of `targets`
    lasts_s: float


def plan(
    seed: int, seconds: float, targets: dict[str, Sequence[str]], kinds: Sequence[str] = tuple(FAULTS)
) -> list[Fault]:
    """targets: for the last word of each kind, whom it can meet. A target suffers one fault at a time."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    busy_until: dict[str, float] = {}
    at_s = CALM_S
    while at_s < seconds - CALM_S:
        kind = rng.choices(kinds, [FAULTS[k][0] for k in kinds])[0]
        _, shortest, longest = FAULTS[kind]
        target = rng.choice(list(targets[kind.split()[1]]))
        lasts_s = min(rng.uniform(shortest, longest), seconds - CALM_S - at_s)
        if busy_until.get(target, 0.0) <= at_s:
            faults.append(Fault(round(at_s, 3), kind, target, round(lasts_s, 3)))
            busy_until[target] = at_s + lasts_s + GAP_S
        at_s += rng.expovariate(1 / GAP_S)
    return faults
