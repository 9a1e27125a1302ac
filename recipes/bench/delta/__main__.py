"""Deltas: the codec beside memcpy and other encodings, and whole pulls over links, with deltas and without.

    python -m recipes.bench.delta codec                  # by density, uniform and clustered; two minutes
    python -m recipes.bench.delta record --lr 1e-6 --out LR1E-6    # versions of a real GRPO run of recipes/verl_grpo
    python -m recipes.bench.delta codec --real LR1E-6    # of these: one to sixteen steps
    python -m recipes.bench.delta links                  # free, 1 Gbit/s, 100 Mbit/s + 50 ms; needs root
    python -m recipes.bench.delta picture CODEC.json REAL.json LINKS.json --out delta.svg    # what --json has saved

Every result is compared bit for bit. Speeds are segment by segment, on one core, the best of some rounds in which all
methods take turns, and shares of a memcpy of the same segments in the same round.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from recipes.bench.delta import codec, links, record
from recipes.bench.results import save

GOALS = {
    "ratio at 1 %": 150,
    "share of the bound, 0.5 to 10 %": 0.85,
    "encode, of memcpy, up to 3 %": 0.30,
    "apply, of memcpy, up to 10 %": 0.30,
    "whole pull that nothing can shorten": 1.05,
    "times faster at 1 % over the thin link": 25,
    "copies over the thin link at 1 %": 0.01,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    commands = parser.add_subparsers(dest="command", required=True)
    by_density = commands.add_parser("codec")
    by_density.add_argument("--percent", type=float, nargs="+", default=[0.1, 0.5, 1, 2, 3, 5, 10, 30, 50, 100])
    by_density.add_argument("--segments", type=int, default=8, help="of 4 MiB")
    by_density.add_argument("--rounds", type=int, default=5)
    by_density.add_argument("--real", type=Path, nargs="+", metavar="FOLDER", help="that `record` has made")
    over_links = commands.add_parser("links")
    over_links.add_argument("--mib", type=int, default=64)
    over_links.add_argument("--percent", type=float, nargs="+", default=[0.1, 1, 5, 30, 100])
    over_links.add_argument(
        "--link", nargs="+", default=["free", "1000/0", "100/50"], help="Mbit/s and round trip in ms"
    )
    over_links.add_argument("--rounds", type=int, default=3)
    recorded = commands.add_parser("record")
    recorded.add_argument("--lr", type=float, default=1e-6)
    recorded.add_argument("--versions", type=int, default=21)
    recorded.add_argument("--size", choices=("tiny", "small", "deep"), default="small", help="of the model")
    recorded.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")) / "bench/delta-recorded")
    drawn = commands.add_parser("picture")
    drawn.add_argument("files", type=Path, nargs="+", metavar="JSON")
    drawn.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "picture":
        from recipes.bench.delta.picture import draw  # matplotlib

        draw(options)
        return
    measure = {"codec": codec.measure, "links": links.measure, "record": record.record}[options.command]
    rows: list[dict[str, Any]] = measure(options)
    save(options.json, {"goals": GOALS, "rows": rows, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
