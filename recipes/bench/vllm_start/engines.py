"""The functions that the benchmark runs in processes of their own. In __main__ a fork server could not import them."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any

CHUNK_SIZE_BYTES = 16 << 20


def answer(pipe: Any, function: Any, arguments: Any) -> None:
    try:
        pipe.send((True, function(*arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def peer(pipe: Any, model: Path, hub: str, name: str, serve_from: str) -> None:
    mine = {"hub": hub, "model": name, "replica": "peer", "serve_from": serve_from}
    extra = {**mine, "disk": "fallback", "disk_version": 1}
    engine = start(model, "tensorhub", extra)
    while engine.collective_rpc("tensorhub_poll")[0]["serving"]:
        time.sleep(0.05)
    pipe.send("serving")
    pipe.poll(None)  # it serves from threads, until it is killed


def side(name: str, model: Path, bare: Path, hub: str, size_bytes: int) -> float:
    """Run one side, and return its seconds."""
    file, (what, _, how) = model / "model.safetensors", name.partition(", ")
    limits = {"memcpy": memcpy, "new memory": new_memory, "tcp": loopback}
    if what in limits:
        return limits[what](size_bytes)
    if how == "cold":
        forget(file)
    elif how == "warm":
        read(file)
    if what == "read":
        return read(file)
    if what == "peer":
        return timed_start(bare, "tensorhub", {"hub": hub, "model": how, "replica": f"reader-{os.getpid()}"})
    if what == "disk":
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
    """Make the model, and return the bytes of its weights."""
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


def new_memory(size_bytes: int) -> float:
    import torch

    memory = torch.empty(size_bytes, dtype=torch.uint8)
    began = time.perf_counter()
    memory.zero_()
    return time.perf_counter() - began


def loopback(size_bytes: int) -> float:
    """Send from touched into touched memory, by two threads, and return the seconds."""
    import torch

    source, target = (memoryview(torch.ones(size_bytes, dtype=torch.uint8).numpy()) for _ in range(2))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        began = time.perf_counter()
        sender = threading.Thread(target=theirs.sendall, args=(source,))
        sender.start()
        while target:
            target = target[ours.recv_into(target[:CHUNK_SIZE_BYTES]) :]
        took = time.perf_counter() - began
        sender.join()
        return took


def forget(file: Path) -> None:
    """Drop the file from the page cache."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(file: Path) -> float:
    """Read the file, which also puts it into the page cache, and return the seconds."""
    buffer = bytearray(CHUNK_SIZE_BYTES)
    began = time.perf_counter()
    with open(file, "rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass
    return time.perf_counter() - began
