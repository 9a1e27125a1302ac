"""Choose the seeds that `make test` runs, few that show what a thousand do: `python tests/sim/choose.py` stores them.

What is done to the hub or to clients changes what happens in a seed. The tests notice when the stored ones show too
little, and run the rest of the thousand then: that takes four times as long, and is when to choose again.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

FILE = Path(__file__).with_name("seeds.txt")
OF, COUNT = 1000, 250
ENOUGH = 40  # of each event: twice as many as the test wants


def stored() -> list[int]:
    return [int(seed) for seed in FILE.read_text().split()]


def choose(shown: dict[int, Counter[str]]) -> list[int]:
    """Take those with the rarest events first, until there is enough of each; then the first ones that are left."""
    total, have = Counter[str](), Counter[str]()
    for events in shown.values():
        total.update(events)
    chosen: list[int] = []
    for event in sorted(total, key=lambda event: (total[event], event)):
        for seed in sorted(shown, key=lambda seed: (-shown[seed][event], seed)):
            if have[event] >= ENOUGH or not shown[seed][event]:
                break
            if seed not in chosen:
                chosen.append(seed)
                have.update(shown[seed])
    rest = [seed for seed in shown if seed not in chosen]
    return sorted(chosen + rest[: COUNT - len(chosen)])


if __name__ == "__main__":
    from programs import simulate

    with ProcessPoolExecutor() as pool:
        seeds = choose(dict(zip(range(OF), pool.map(simulate, range(OF), chunksize=10), strict=True)))
    lines = [" ".join(f"{seed:3}" for seed in seeds[k : k + 25]) for k in range(0, len(seeds), 25)]
    FILE.write_text("\n".join(lines) + "\n")
