"""How long an engine waits for its weights when it starts: from a peer against from disk.

    python -m recipes.bench.vllm_start [--rounds 3] [--layers 24]

Model: the shapes of Qwen2.5-0.5B with two layers more (1048 MB in bfloat16), random weights. What is timed is
`load_model` of vLLM's worker, for all sides, in a new process each time; Python's imports, the KV cache and warm-up are
the same and left out. Sides, in turn in every round, each round in another order:
    vLLM            vLLM's own loader, from disk
    disk            the same, with linear layers that stay updatable, as every engine of the store has them on a CPU
    peer, live      read in place from the live weights of an engine on this host, over TCP
    peer, copy      the same from an engine that serves a copy in shared memory (serve_from: host)
cold: the page cache has just been told to drop the file; warm: it holds all of it.
Limits, measured in the same rounds: memcpy of the same bytes into touched memory, touching so much new memory, a bare
TCP connection on this host, and reading the file without doing anything with it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from recipes.bench.results import save
from recipes.bench.vllm_start import engines
from tensorhub_plugins.core import Server, start_server

SIDES = ("vLLM, cold", "vLLM, warm", "disk, cold", "disk, warm", "peer, live", "peer, copy")
LIMITS = ("memcpy", "new memory", "tcp", "read, cold", "read, warm")
START_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--json", type=Path, help="write the seconds of every round here")
    options = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"])
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder, start_server() as hub:
        model, bare = Path(folder) / "model", Path(folder) / "bare"
        size_bytes = in_process(context, engines.make_model, model, options.layers)
        shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
        seconds: dict[str, list[float]] = {name: [] for name in (*SIDES, *LIMITS)}
        peers = [Peer(context, model, hub, *named) for named in (("live", "live"), ("copy", "host"))]
        try:
            for round_number in range(options.rounds + 1):
                order = [*SIDES, *LIMITS]
                order = order[round_number % len(order) :] + order[: round_number % len(order)]
                for name in order:
                    took = in_process(context, engines.side, name, model, bare, hub.address, size_bytes)
                    if round_number:  # the first is a rehearsal
                        seconds[name].append(took)
                    print(f"round {round_number}: {name:12} {took:7.3f} s", file=sys.stderr, flush=True)
        finally:
            for peer in peers:
                peer.close()
    save(options.json, {"bytes": size_bytes, "seconds": seconds})
    print(table(seconds, size_bytes))


def table(seconds: dict[str, list[float]], size_bytes: int) -> str:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    lines = [f"{size_bytes / 1e6:.0f} MB, {len(seconds['memcpy'])} rounds, load {os.getloadavg()[0]:.1f}"]
    lines.append(f"{'':12} {'median':>8} {'least':>8} {'most':>8}   times memcpy   times peer, live")
    for name, values in seconds.items():
        lines.append(
            f"{name:12} {median[name]:7.3f}s {min(values):7.3f}s {max(values):7.3f}s "
            f"{median[name] / median['memcpy']:13.1f} {median[name] / median['peer, live']:18.2f}"
        )
    return "\n".join(lines)


# --- in processes of their own, see engines.py ---


def in_process(context: Any, function: Any, *arguments: Any) -> Any:
    pipe, theirs = context.Pipe()
    process = context.Process(target=engines.answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not pipe.poll(START_TIMEOUT_S):
            raise SystemExit(f"{function.__name__}: no answer within {START_TIMEOUT_S:.0f} s")
        succeeded, value = pipe.recv()
        if not succeeded:
            raise SystemExit(value)
        return value
    finally:
        process.kill()
        process.join()


class Peer:
    """An engine that has the model and serves it, under a model name of its own."""

    def __init__(self, context: Any, model: Path, hub: Server, name: str, serve_from: str) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=engines.peer, args=(theirs, model, hub.address, name, serve_from))
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_TIMEOUT_S) or self._pipe.recv() != "serving":
            raise SystemExit("the peer did not start; what it printed says why")

    def close(self) -> None:
        self._process.kill()
        self._process.join()


if __name__ == "__main__":
    main()
