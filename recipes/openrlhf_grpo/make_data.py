"""Write sums of two digits ("3+4=") as prompts for OpenRLHF: make_data.py FILE.jsonl [--count N]."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def make_rows(count: int, seed: int) -> list[dict[str, str]]:
    numbers = random.Random(seed)
    pairs = [(numbers.randint(0, 9), numbers.randint(0, 9)) for _ in range(count)]
    return [{"input": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    rows = make_rows(arguments.count, arguments.seed)
    arguments.file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
