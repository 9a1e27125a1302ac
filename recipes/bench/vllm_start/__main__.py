"""How long an engine waits for its weights when it starts: from a peer against from disk.

    python -m recipes.bench.vllm_start [--rounds 3] [--layers 24]

Model: the shapes of Qwen2.5-0.5B (988 MB in bfloat16), random weights. What is timed is `load_model` of vLLM's worker,
for all sides, in a new process each time; Python's imports, the KV cache and warm-up are the same and left out.
Sides, in turn in every round, each round in another order:
    disk, cold      vLLM's own loader; the page cache has just been told to drop the file
    disk, warm      the same, with the file in the page cache
    disk, live      as warm, with linear layers that stay updatable, as every engine of the store has them on a CPU
    peer            read in place from the live weights of an engine on this host, over TCP
Limits, measured in the same rounds: memcpy of the same bytes into touched memory, and reading the file (cold) without
doing anything with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tensorhub_plugins.core import Server, start_server

SIDES = ("disk, cold", "disk, warm", "disk, live", "peer")
LIMITS = ("memcpy", "read, cold")
START_DEADLINE_S = 300.0
CHUNK_SIZE_BYTES = 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write the seconds of every round here")
    options = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"])
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder, start_server() as hub:
        model, bare = Path(folder) / "model", Path(folder) / "bare"
        size_bytes = in_process(context, make_model, model, options.layers)
        shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
        seconds: dict[str, list[float]] = {name: [] for name in (*SIDES, *LIMITS)}
        peer = Peer(context, model, hub)
        try:
            for round_number in range(options.rounds + 1):
                order = [*SIDES, *LIMITS]
                order = order[round_number % len(order) :] + order[: round_number % len(order)]
                for name in order:
                    took = in_process(context, side, name, model, bare, hub.address, size_bytes)
                    if round_number:  # the first is a rehearsal
                        seconds[name].append(took)
                    print(f"round {round_number}: {name:12} {took:7.3f} s", file=sys.stderr, flush=True)
        finally:
            peer.close()
    if options.json:
        options.json.write_text(json.dumps({"bytes": size_bytes, "seconds": seconds}, indent=1))
    print(table(seconds, size_bytes))


def table(seconds: dict[str, list[float]], size_bytes: int) -> str:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    lines = [f"{size_bytes / 1e6:.0f} MB, {len(seconds['peer'])} rounds, load {os.getloadavg()[0]:.1f}"]
    lines.append(f"{'':12} {'median':>8} {'least':>8} {'most':>8}   times memcpy   times peer")
    for name, values in seconds.items():
        lines.append(
            f"{name:12} {median[name]:7.3f}s {min(values):7.3f}s {max(values):7.3f}s "
            f"{median[name] / median['memcpy']:13.1f} {median[name] / median['peer']:12.2f}"
        )
    return "\n".join(lines)


# --- in processes of their own ---


def in_process(context: Any, function: Any, *arguments: Any) -> Any:
    pipe, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not pipe.poll(START_DEADLINE_S):
            raise SystemExit(f"{function.__name__}: no answer within {START_DEADLINE_S:.0f} s")
        succeeded, value = pipe.recv()
        if not succeeded:
            raise SystemExit(value)
        return value
    finally:
        process.kill()
        process.join()


def _answer(pipe: Any, function: Any, arguments: Any) -> None:
    try:
        pipe.send((True, function(*arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


class Peer:
    """An engine that has the model and serves it."""

    def __init__(self, context: Any, model: Path, hub: Server) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_peer, args=(theirs, model, hub.address))
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_DEADLINE_S) or self._pipe.recv() != "serving":
            raise SystemExit("the peer did not start; what it printed says why")

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _peer(pipe: Any, model: Path, hub: str) -> None:
    extra = {"hub": hub, "model": "actor", "replica": "peer", "disk": "fallback", "disk_version": 1}
    engine = start(model, "tensorhub", extra)
    while engine.collective_rpc("tensorhub_poll")[0]["serving"]:
        time.sleep(0.05)
    pipe.send("serving")
    pipe.poll(None)  # it serves from threads, until it is killed


def side(name: str, model: Path, bare: Path, hub: str, size_bytes: int) -> float:
    """Seconds."""
    file = model / "model.safetensors"
    if name == "memcpy":
        return memcpy(size_bytes)
    if name.endswith("cold"):
        forget(file)
    else:
        read(file)
    if name.startswith("read"):
        return read(file)
    if name == "peer":
        return timed_start(bare, "tensorhub", {"hub": hub, "model": "actor", "replica": f"reader-{os.getpid()}"})
    if name == "disk, live":
        return timed_start(model, "tensorhub", {"disk": "only"})
    return timed_start(model, "auto", {})


def timed_start(model: Path, load_format: str, extra: dict[str, Any]) -> float:
    from vllm.v1.worker.gpu_worker import Worker

    took = []
    original = Worker.load_model

    def load_model(self: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        original(self, **kwargs)
        took.append(time.perf_counter() - began)

    Worker.load_model = load_model
    engine = start(model, load_format, extra)
    if extra.get("hub"):
        engine.collective_rpc("tensorhub_close")  # or the next one might read from this one, which is killed
    return took[0]


def start(model: Path, load_format: str, extra: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return LLM(
        str(model),
        load_format=load_format,
        model_loader_extra_config=extra,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        kv_cache_memory_bytes=16 << 20,
        distributed_executor_backend=UniProcExecutor,
        disable_log_stats=True,
    )


def make_model(folder: Path, layers: int) -> int:
    """Bytes of its weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="100GB")
    with open(folder / "model.safetensors", "rb+") as file:
        os.fsync(file.fileno())
    return sum(parameter.nbytes for parameter in model.parameters())


def memcpy(size_bytes: int) -> float:
    import torch

    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.ones(size_bytes, dtype=torch.uint8)
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def forget(file: Path) -> None:
    """Drop the file from the page cache."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(file: Path) -> float:
    """Seconds to read it, which also puts it into the page cache."""
    buffer = bytearray(CHUNK_SIZE_BYTES)
    began = time.perf_counter()
    with open(file, "rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
