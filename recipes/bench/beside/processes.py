"""The processes around the engine that decodes: the hub, a trainer, and other engines of the host."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from tensorhub_plugins.core import Client, Fetched, start_server

TENSORS, TENSOR_SIZE_BYTES = 128, 8 << 20
TIMEOUT_S = 120.0


@contextmanager
def process(name: str, hub: str = "") -> Iterator[Connection]:
    """Start a worker of the store, or the hub, in a process of its own, which does what it is asked."""
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    started = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, name, hub), daemon=True)
    started.start()
    theirs.close()
    try:
        yield mine
    finally:
        mine.close()
        started.join(10.0)


def ask(peer: Connection, *question: Any) -> Any:
    peer.send(question)
    answer, error = peer.recv()
    if error:
        raise RuntimeError(error)
    return answer


def serve(pipe: Connection, name: str, hub: str) -> None:
    if not hub:
        with start_server() as server:
            pipe.recv()
            pipe.send((server.address, ""))
            with suppress(EOFError):
                pipe.recv()
        return
    with worker_of(hub, name) as worker:
        kept: dict[int, Fetched] = {}
        versions = iter(range(1, 1 << 30))
        tensors = {f"w{k}": torch.full((TENSOR_SIZE_BYTES // 2,), k, dtype=torch.bfloat16) for k in range(TENSORS)}
        while True:
            try:
                what, *arguments = pipe.recv()
            except EOFError:
                return
            answer, error = None, ""
            try:
                match what:
                    case "publish":
                        answer = next(versions)
                        for tensor in tensors.values():
                            tensor[:64] = answer
                        worker.publish(answer, tensors)
                    case "fetch":
                        kept[arguments[0]] = fetch(worker, *arguments)
                    case "drop":
                        drop(worker, arguments[0], [kept.pop(arguments[0])] if arguments[0] in kept else [])
            except Exception as failure:
                error = f"{name} could not {what}: {failure}"
            pipe.send((answer, error))


def worker_of(hub: str, name: str) -> Client:
    """Make a worker: a trainer is read over TCP only, as if on another host; all others share their memory."""
    torch.set_num_threads(1)
    transports = ("tcp",) if name == "trainer" else ("shm", "tcp")
    return Client(hub, run="bench", model="m", replica=name, transports=transports)


def fetch(worker: Client, version: int, transport: str, borrow: bool) -> Fetched:
    fetched = worker.fetch(version, timeout_s=TIMEOUT_S, serve=True, borrow=borrow)
    if set(fetched.report.transports) != {transport}:
        raise RuntimeError(f"read by {set(fetched.report.transports)}, and not by {transport}")
    return fetched


def drop(worker: Client, version: int, kept: list[Fetched]) -> None:
    worker.unpublish(version)
    for fetched in kept:
        fetched.release()
