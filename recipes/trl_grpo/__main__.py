"""A hub, two vLLM servers that follow, and a real run of TRL's AsyncGRPOTrainer: python -m recipes.trl_grpo

All on this machine, with a tiny model of random weights, in the folder out/trl_grpo. The second server has no weights
on its disk, and joins while TRL trains: it reads them from a peer. At the end both hold the last version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from recipes.ranks import free_port
from recipes.servers import ROOT, holders, processes, report, until

# How TRL finds the text of an answer, with a chat template that it does not know.
ANSWER = {
    "x-regex": r"^(?P<content>[\s\S]*?)(?:<eos>)?$",
    "type": "object",
    "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "trl_grpo")
    options = parser.parse_args()
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        parser.error("TRL is not installed: pip install trl==1.16.0, or make test-trl")
    with processes(options.out, also=[ROOT / "recipes/cpu/trl", Path(trl.origin).parents[1]]) as here:
        for folder in (here.model, here.bare):
            file = folder / "tokenizer_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"response_schema": ANSWER}))
        ports = [free_port(), free_port()]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        told = [
            "--hub",
            here.hub,
            "--servers",
            *urls,
            "--steps",
            str(options.steps),
            "--out",
            str(here.out / "trained"),
        ]
        servers = [here.serve("server-0", here.model, ports[0], str(here.model), disk="fallback")]
        trainer = here.start("trainer", "recipes/trl_grpo/train.py", str(here.model), *told)
        log = here.log("trainer")
        until(lambda: rewards(log), "TRL takes its first step", trainer, *servers)
        servers.append(here.serve("server-1", here.bare, ports[1], str(here.model)))
        until(lambda: trainer.poll() is not None, "training ends", *servers)
        newest = options.steps + 1
        held = ["server-0/0", "server-1/0"]
        until(lambda: holders(here.hub, newest) == held, f"both servers hold version {newest}", *servers)
        found = rewards(log)
        print("rewards:", " ".join(f"{each:.2f}" for each in found))
        return report(
            {
                "TRL ended well": trainer.returncode == 0,
                f"it has logged {options.steps} steps": len(found) == options.steps,
                "its reward has risen": sum(found[-4:]) / 4 > sum(found[:4]) / 4,
                f"both servers hold version {newest} and serve it": True,  # or `until` had raised
                "the second server started from a peer": "from server-0" in here.log("server-1").read_text(),
            }
        )


def rewards(log: Path) -> list[float]:
    """Return the rewards that TRL has logged."""
    return [float(each) for each in re.findall(r"'reward': '?([-\d.e]+)", log.read_text(errors="replace"))]


if __name__ == "__main__":
    sys.exit(main())
