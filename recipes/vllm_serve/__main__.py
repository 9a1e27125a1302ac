"""A hub, two vLLM servers that follow, and a training loop that publishes: python -m recipes.vllm_serve

All on this machine, with a tiny model of random weights, in the folder out/vllm_serve. The second server has no weights
on its disk and joins when the first one answers: it reads them from there. At the end both hold the last version and
give the same greedy answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from recipes.ranks import free_port
from recipes.servers import ROOT, holders, processes, report, until


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "vllm_serve")
    options = parser.parse_args()
    with processes(options.out) as here:
        ports = [free_port(), free_port()]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        told = ["--hub", here.hub, "--servers", *urls, "--steps", str(options.steps)]
        trainer = here.start("trainer", "recipes/vllm_serve/train.py", str(here.model), *told)
        servers = [here.serve("server-0", here.model, ports[0], "actor")]
        until(lambda: answer(urls[0]), "the first server answers", trainer, *servers)
        servers.append(here.serve("server-1", here.bare, ports[1], "actor"))
        until(lambda: answer(urls[1]), "the second server answers", *servers)
        until(lambda: trainer.poll() is not None, "training ends", *servers)
        print(here.log("trainer").read_text().strip().splitlines()[-1])

        newest = options.steps + 1
        held = ["server-0/0", "server-1/0"]
        until(lambda: holders(here.hub, newest) == held, f"both servers hold version {newest}", *servers)
        said = [answer(url) for url in urls]
        return report(
            {
                "the trainer ended well": trainer.returncode == 0,
                f"both servers hold version {newest} and serve it": True,  # or `until` had raised
                "they give the same greedy answer": said[0] == said[1] and said[0] is not None,
                "the second server started from the first": "from server-0" in here.log("server-1").read_text(),
            }
        )


def answer(url: str) -> str | None:
    """Return the greedy answer; None while the server is not up."""
    request = {"model": "actor", "prompt": "1 + 1 = ", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    try:
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{url}/v1/completions", json.dumps(request).encode(), headers), timeout=60) as reply:
            return str(json.load(reply)["choices"][0]["text"])
    except (URLError, ConnectionError, TimeoutError):
        return None


if __name__ == "__main__":
    sys.exit(main())
