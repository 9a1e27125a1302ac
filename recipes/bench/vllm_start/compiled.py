"""How long an engine that compiles takes to its first token: alone, and with what another one has compiled.

    python -m recipes.bench.vllm_start.compiled [--rounds 3] [--size small]

Every engine is a new process of vLLM's CPU build with torch.compile, and has empty cache folders of its own, as on a
host of its own. `first` publishes what it compiles, `store` finds that at the hub, `alone` does without (option
compile_cache="off"); `kept` starts once more in the folders of `alone`, which is the best that can be had. Sides take
turns, each round in another order, each round with a new hub.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.bench.results import save
from recipes.verl_grpo.make_model import make_model, make_tokenizer
from tensorhub_plugins.core import Keys, new_secret
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.hub.server import start_server

SIDES = ("first", "store", "alone", "kept")
OFFER_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=("tiny", "small", "deep"), default="small")
    parser.add_argument("--json", type=Path, help="write the seconds of every round here")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        tokenizer = make_tokenizer()
        for each in (tokenizer, make_model(options.size, tokenizer)):
            each.save_pretrained(model)
        for number in range(options.rounds):
            for side, took in one_round(model, Path(folder, str(number)), later_first=number % 2 == 1):
                seconds[side].append(took)
                print(f"round {number + 1}: {side} {took:.1f} s", flush=True)
    alone = statistics.median(seconds["alone"])
    for side in SIDES:
        middle = statistics.median(seconds[side])
        print(f"{side:6} {middle:6.1f} s   {alone / middle:.2f} times as fast as alone")
    save(options.json, seconds)


def one_round(model: Path, root: Path, *, later_first: bool) -> Iterator[tuple[str, float]]:
    """Yield the seconds of each side."""
    keys = new_secret()
    with start_server(keys=keys) as hub:

        def start(side: str, folder: str, option: str) -> Any:
            return engine(model, root / folder, side, hub.address, keys, option)

        with start("first", "first", "on") as first:
            yield "first", first["started_s"]
            wait_until_offered(hub.address, keys)
            pairs = [("store", "store", "on"), ("alone", "alone", "off")]
            for side, folder, option in reversed(pairs) if later_first else pairs:
                with start(side, folder, option) as later:
                    yield side, later["started_s"]
            with start("kept", "alone", "off") as kept:
                yield "kept", kept["started_s"]


@contextmanager
def engine(model: Path, root: Path, name: str, hub: str, keys: Keys, option: str) -> Iterator[dict[str, Any]]:
    """Start an engine whose caches are below a folder; yield its seconds to the first tokens, these, and its log."""
    root.mkdir(parents=True, exist_ok=True)
    places = {"HOME": str(root), "VLLM_CACHE_ROOT": str(root / "vllm"), "TRITON_CACHE_DIR": str(root / "triton")}
    store = {"hub": hub, "run": "r", "model": "actor", "replica": name, "disk": "only", "compile_cache": option}
    said = root / f"{name}.log"
    with said.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "recipes.bench.vllm_start.compiled_engine", str(model), json.dumps(store)],
            env={**os.environ, **places, "TENSORHUB_SECRET": keys.text()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("{"):
                    break
            else:
                raise SystemExit(f"the engine {name} did not start:\n{said.read_text()[-3000:]}")
            yield {**json.loads(lines.pop()), "log": "".join(lines)}
        finally:
            process.communicate("\n")


def wait_until_offered(hub: str, keys: Keys) -> None:
    """Return when an engine's compiled files are at the hub."""
    deadline = time.monotonic() + OFFER_S
    while time.monotonic() < deadline:
        for model in fetch_status(hub, keys=keys)["models"]:
            if ".compiled-" in model["model"] and model["versions"]:
                return
        time.sleep(0.1)
    raise SystemExit(f"nothing was offered within {OFFER_S} s")


if __name__ == "__main__":
    main()
