"""One host: from one process's tensors into those of K others, by the store, by its peers, and by the bare means.

    python -m recipes.bench.loopback                # everything that is installed here
    python -m recipes.bench.loopback --work tiny --methods stream,store,gloo

Time runs from the first process past the barrier to the last reader that has all bytes in its own tensors: publish,
digests, packing, put and save are in it; connections, registration, allocation and two times to warm up are not. Pages
are touched first. Content is fresh every time and compared afterwards. The methods take turns within a round, each for
the median of three times, and so do the limits: memcpy in one process, and one plain TCP stream. CPU seconds are those
of all processes together.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch

from recipes.bench.loopback import methods
from recipes.bench.results import save
from tensorhub_plugins.core import start_server

CELL_S_MAX = 120.0
BLOCK = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(methods.METHODS), help="of: " + ", ".join(methods.METHODS))
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--work", choices=("model", "tiny", "block"), default="model")
    parser.add_argument("--layers", type=int, default=8, help="of Qwen2.5-0.5B: 8 are 511 MB in 98 tensors, 24 988 MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shapes = shapes_of(options.work, options.layers)
    size_bytes = sum(2 * math.prod(shape) for shape in shapes)
    print(f"{size_bytes / 1e6:.0f} MB in {len(shapes)} bf16 tensors", flush=True)
    cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
    limits: list[float] = []
    for _ in range(options.rounds):
        limits.append(memcpy_s(shapes))
        for readers in options.readers:
            for name in options.methods.split(","):
                reason = methods.METHODS[name].missing()
                got = {"error": reason} if reason is not None else cell(name, readers, shapes)
                cells.setdefault((name, readers), []).append(got)
                said = f"{got['seconds']:.4f} s" if "seconds" in got else "not run"
                print(f"  round {len(limits)}, K={readers}, {name}: {said}", file=sys.stderr, flush=True)
    memcpy = statistics.median(limits)
    print(f"memcpy {memcpy:.4f} s ({size_bytes / memcpy / 1e9:.1f} GB/s)  load {os.getloadavg()[0]:.1f}")
    rows = []
    for (name, readers), got in cells.items():
        good = [each for each in got if "seconds" in each]
        row: dict[str, Any] = {"method": name, "readers": readers, "rounds": got}
        if good:
            row["seconds"] = statistics.median(each["seconds"] for each in good)
            row["cpu_s"] = statistics.median(each["cpu_s"] for each in good)
            row["to_memcpy"] = memcpy / row["seconds"]
            stream = cells.get(("stream", readers), [])
            times = [each["seconds"] for each in stream if "seconds" in each]
            row["to_stream"] = statistics.median(times) / row["seconds"] if times else None
        rows.append(row)
        print(as_text(row), flush=True)
    save(options.json, {"size_bytes": size_bytes, "tensors": len(shapes), "memcpy_s": limits, "rows": rows})


def as_text(row: dict[str, Any]) -> str:
    start = f"K={row['readers']}  {row['method']:18}"
    if "seconds" not in row:
        return f"{start} not run: {row['rounds'][0]['error'].strip().splitlines()[-1][:120]}"
    stream = f"{row['to_stream']:5.2f}" if row["to_stream"] else "    -"
    return (
        f"{start} {row['seconds']:.4f} s  {row['to_memcpy']:5.2f} of memcpy  {stream} of a plain stream  "
        f"cpu {row['cpu_s']:.2f} s"
    )


def shapes_of(work: str, layers: int) -> list[tuple[int, ...]]:
    if work == "tiny":  # 5,000 tensors of 1.8 KB and 14 KB, 40 MB
        return [(896,) if index % 2 else (896, 8) for index in range(5000)]
    if work == "block":  # the same bytes as tiny, in one
        return [(896 * 9 * 2500,)]
    hidden, narrow, wide, vocabulary = 896, 128, 4864, 151936
    layer = [(hidden, hidden), (hidden,), (narrow, hidden), (narrow,), (narrow, hidden), (narrow,), (hidden, hidden)]
    layer += [(wide, hidden), (wide, hidden), (hidden, wide), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *layer * layers, (hidden,)]


def memcpy_s(shapes: list[tuple[int, ...]]) -> float:
    """Return the seconds in which one thread copies all tensors into others, the faster of two times."""
    torch.set_num_threads(1)
    sources = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes]
    targets = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    taken = []
    for _ in range(3):
        began = time.monotonic()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        taken.append(time.monotonic() - began)
    return min(taken[1:])


# --- one method, one K ---


def cell(name: str, readers: int, shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(readers + 1)
    board = context.Manager().dict() if methods.METHODS[name].needs_board else {}
    hub_line, hub_end = context.Pipe()
    hub = context.Process(target=_serve_hub, args=(hub_end, methods.METHODS[name].secret), daemon=True)
    hub.start()
    address = hub_line.recv()
    lines, processes = [], []
    for rank in range(readers + 1):
        line, end = context.Pipe()
        arguments = (end, name, rank, readers, shapes, barrier, board, address)
        processes.append(context.Process(target=_run, args=arguments))
        processes[-1].start()
        lines.append(line)
    try:
        deadline = time.monotonic() + CELL_S_MAX
        answers: list[Any] = []
        for line in lines:
            if not line.poll(max(0.0, deadline - time.monotonic())):
                return {"error": f"not done within {CELL_S_MAX:g} s"}
            answers.append(line.recv())
        errors = [each for each in answers if isinstance(each, str)]
        if errors:
            real = [error for error in errors if "BrokenBarrier" not in error] or errors
            return {"error": real[0]}
        times = list(zip(*(a["times"] for a in answers), strict=True))  # each of all processes, the source first
        return {
            "seconds": statistics.median(
                max(t["ended"] for t in each[1:]) - min(t["began"] for t in each) for each in times
            ),
            "cpu_s": statistics.median(sum(t["cpu_s"] for t in each) for each in times),
            "source_cpu_s": statistics.median(each[0]["cpu_s"] for each in times),
            **answers[-1]["notes"],
        }
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        hub_line.send("end")
        hub.join(10)


def _serve_hub(line: Connection, has_secret: bool) -> None:
    server = start_server(keys=methods.KEYS if has_secret else None)
    line.send(server.address)
    line.recv()
    server.close()


def _run(
    line: Connection,
    name: str,
    rank: int,
    readers: int,
    shapes: list[tuple[int, ...]],
    barrier: Any,
    board: Any,
    address: str,
) -> None:
    torch.set_num_threads(1)
    try:
        place = methods.Place(rank, readers, address, barrier, board)
        tensors = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
        method = methods.METHODS[name](place, tensors)
        tensors = method.tensors
        measured: list[dict[str, float]] = []
        for round_ in range(1, methods.TIMES + 1):  # the first ones warm up
            if rank == 0:
                _fill(tensors, round_)
            method.prepare(round_)
            barrier.wait(CELL_S_MAX)
            cpu, began = _cpu_s(), time.monotonic()
            method.run(round_)
            ended, cpu_s = time.monotonic(), _cpu_s() - cpu
            barrier.wait(CELL_S_MAX)
            if rank and not _is(tensors, round_):
                raise RuntimeError("other bytes arrived than were sent")
            barrier.wait(CELL_S_MAX)
            measured.append({"began": began, "ended": ended, "cpu_s": cpu_s})
        line.send({"times": measured[methods.WARM_UP :], "notes": method.notes})
        barrier.wait(CELL_S_MAX)
        method.close()
    except BaseException:
        with contextlib.suppress(Exception):
            barrier.abort()
        line.send(traceback.format_exc())
    os._exit(0)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def _noise(round_: int) -> torch.Tensor:
    noise = numpy.random.default_rng(round_).integers(0, 1 << 15, BLOCK, dtype=numpy.int16)
    return torch.from_numpy(noise)


def _fill(tensors: list[torch.Tensor], round_: int) -> None:
    noise = _noise(round_)
    for index, tensor in enumerate(tensors):
        flat = tensor.view(torch.int16).view(-1)
        for at in range(0, flat.numel(), BLOCK):
            part = flat[at : at + BLOCK]
            part.copy_(noise[: part.numel()])
        flat[0] = index


def _is(tensors: list[torch.Tensor], round_: int) -> bool:
    noise = _noise(round_)
    for index, tensor in enumerate(tensors):
        flat = tensor.view(torch.int16).view(-1)
        if int(flat[0]) != index:
            return False
        for at in range(0, flat.numel(), BLOCK):
            part = flat[at : at + BLOCK]
            first = at == 0
            if not torch.equal(part[first:], noise[first : part.numel()]):
                return False
    return True


if __name__ == "__main__":
    main()
