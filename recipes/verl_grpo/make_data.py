"""Write train.parquet and test.parquet with sums of two digits as prompts ("3+4="): make_data.py FOLDER."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pandas


def make_rows(count: int, split: str, seed: int) -> pandas.DataFrame:
    numbers = random.Random(seed)
    rows = []
    for index in range(count):
        a, b = numbers.randint(0, 9), numbers.randint(0, 9)
        rows.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{a}+{b}="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": split, "index": index},
            }
        )
    return pandas.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=512)
    parser.add_argument("--test", type=int, default=16)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make_rows(arguments.train, "train", seed=0).to_parquet(arguments.folder / "train.parquet")
    make_rows(arguments.test, "test", seed=1).to_parquet(arguments.folder / "test.parquet")


if __name__ == "__main__":
    main()
