"""How an engine that decodes is affected by the store: installs, a fetch alongside, a start from a peer."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping

import torch

from recipes.bench.gpu.engine import Engine
from recipes.bench.gpu.limits import Limits
from recipes.bench.gpu.source import Source
from recipes.bench.gpu.store import TIMEOUT_S, Figure, Setting, check_equal, client_of
from tensorhub_plugins.core import copy_all, start_server
from tensorhub_plugins.core.memory import pinning
from tensorhub_plugins.core.transports import unavailable

LAYERS, WIDTH = 24, 8192  # 3.2 GB
LAYERS_SMALL, WIDTH_SMALL = 2, 64
STEPS_MIN = 50  # of which a p99 is said; on a GPU it goes on until the fetch has ended
TRANSPORTS = {"cuda_ipc": "device_copy", "shm": "memcpy", "tcp": "tcp"}  # the fastest first, and its limit


def _engine(setting: Setting) -> Engine:
    layers, width = (LAYERS, WIDTH) if setting.machine.is_gpu else (LAYERS_SMALL, WIDTH_SMALL)
    engine = Engine(setting.machine.torch_device, layers=layers, width=width)
    engine.capture()
    return engine


def _live(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the weights under the names that a source gives them."""
    return {f"t{at:04d}": tensor for at, tensor in enumerate(engine.weights.values())}


def _published(setting: Setting, weights: Mapping[str, torch.Tensor]) -> Setting:
    return Setting(setting.machine, [tuple(tensor.shape) for tensor in weights.values()], setting.times)


def first_tokens(setting: Setting, limits: Limits) -> list[Figure]:
    """Measure a staged install into an engine whose decode step is captured, until its next token."""
    engine = _engine(setting)
    live, taken = _live(engine), []
    of = _published(setting, live)
    tensors = of.tensors(3)
    with start_server() as server, client_of(server.address, "trainer") as trainer:
        trainer.publish(1, tensors)
        with client_of(server.address, "rollout") as rollout:
            arrived = rollout.fetch(1, timeout_s=TIMEOUT_S).tensors()
            pinning.wait_for_background(TIMEOUT_S)
            for _ in range(setting.times + 1):
                engine.step()
                engine.finish()
                began = time.perf_counter()
                copy_all((live[name], arrived[name]) for name in live)
                engine.step()
                engine.finish()
                taken.append(time.perf_counter() - began)
            check_equal(live, tensors)
    bare = statistics.median(_latencies(engine, STEPS_MIN))
    median = statistics.median(taken[1:])
    remark = f"of it one decode step: {bare:.5f} s"
    return [Figure("first token after a staged install", median, of.size_bytes, "h2d", goal=1 / 1.1, remark=remark)]


def slowdowns(setting: Setting, limits: Limits) -> list[Figure]:
    """Decode steps while this very process fetches, digests and serves another version."""
    engine = _engine(setting)
    idle = _latencies(engine, STEPS_MIN * 10)
    with (
        start_server() as server,
        Source(server.address, setting, "tcp") as source,
        client_of(server.address, "rollout") as rollout,
    ):
        version, expected = source.publish()
        fetched: list[Mapping[str, torch.Tensor]] = []
        thread = threading.Thread(
            target=lambda: fetched.append(rollout.fetch(version, timeout_s=TIMEOUT_S, serve=True).tensors())
        )
        thread.start()
        busy = _latencies(engine, STEPS_MIN, goes_on=thread.is_alive)
        thread.join()
        check_equal(fetched[0], expected)
    found = []
    for at in (50, 99):
        limit = statistics.quantiles(idle, n=100)[at - 1]
        now = statistics.quantiles(busy, n=100)[at - 1]
        goal_s = 1.1 * limit if at == 99 else 0.0
        remark = f"{now / limit:.2f} times {limit:.5f} s without a fetch"
        found.append(Figure(f"decode p{at} beside a fetch by tcp", now, goal_s=goal_s, remark=remark))
    return found


def starts(setting: Setting, limits: Limits) -> list[Figure]:
    """Measure the start of an engine that reads its weights from a running one's process, until its first token."""
    transport = next(name for name in TRANSPORTS if unavailable(name) is None)
    first = _engine(setting)
    of = _published(setting, _live(first))
    del first
    with (
        start_server() as server,
        Source(server.address, of, transport) as source,
        client_of(server.address, "rollout", transports=(transport, "tcp")) as rollout,
    ):
        reading, whole = [], []
        for _ in range(setting.times + 1):
            version, expected = source.publish()
            began = time.perf_counter()
            engine = _engine(setting)
            made = time.perf_counter()
            rollout.replicate(_live(engine), version, timeout_s=TIMEOUT_S, serve=False)
            engine.step()
            engine.finish()
            whole.append(time.perf_counter() - began)
            reading.append(time.perf_counter() - made)
            check_equal(_live(engine), expected)
    of_all = f"{statistics.median(whole[1:]):.3f} s with what an engine allocates and captures"
    name = f"engine start from a peer by {transport}"
    return [Figure(name, statistics.median(reading[1:]), of.size_bytes, TRANSPORTS[transport], remark=of_all)]


def _latencies(engine: Engine, steps: int, goes_on: Callable[[], bool] = lambda: False) -> list[float]:
    """Return the seconds of each decode step, at least so many."""
    taken: list[float] = []
    while len(taken) < steps or goes_on():
        began = time.perf_counter()
        engine.step()
        engine.finish()
        taken.append(time.perf_counter() - began)
    return taken


FIGURES: dict[str, Callable[[Setting, Limits], list[Figure]]] = {
    "first_tokens": first_tokens,
    "slowdowns": slowdowns,
    "starts": starts,
}
