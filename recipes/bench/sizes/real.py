"""The table's arithmetic beside real processes: a trainer of two FSDP2 ranks, two vLLM engines with TP = 2 on one host.

What is counted: bytes by source, of the workers' own reports; what the trainer's ranks have published, and their
collectives; messages at the hub; and the memory that the kernel has given to the slabs (memfds) of a host's processes,
each once, however often it is mapped. For the last version, when all memory is allocated, and start-up costs are over.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from recipes.bench.sizes import engine as engines
from recipes.bench.sizes import predict
from recipes.bench.sizes.models import Model, worker_of
from recipes.bench.sizes.ranks import Rank
from recipes.ranks import free_port, started
from tensorhub_plugins.core import start_server
from tensorhub_plugins.core.hub import hub as hub_machine
from tensorhub_plugins.core.protocol import messages

ROOT = Path(__file__).resolve().parents[3]
SMALL = Model("Qwen2", (1024, 2048, 3, 8, 4, 8192), ranks=2, tp=(2,))  # its larger matrices are cut
VERSIONS = 4
START_TIMEOUT_S, CALL_TIMEOUT_S = 600.0, 240.0
TOLERANCE = 0.02
# Messages that workers send by themselves, and at their start.
NOT_OF_A_VERSION = (messages.Heartbeat, messages.Hello)


def check(measured: Mapping[str, int], predicted: Mapping[str, int]) -> list[str]:
    """Return the figures that are not within TOLERANCE of the prediction, or are missing."""
    return [
        f"{name}: measured {measured.get(name)}, predicted {value}"
        for name, value in predicted.items()
        if abs(measured.get(name, -1) - value) > TOLERANCE * value
    ]


def predicted(*, slices: int = SMALL.tp[0]) -> dict[str, int]:
    """Return the prediction for trainers that cut matrices into so many slices. Run it in its own process, see
    ranks.py."""
    tp = SMALL.tp[0]
    workers = [worker_of(SMALL, Rank(tp, rank)) for rank in range(tp)]
    tables = predict.trainer_tables(workers[0].plan.shapes, SMALL.ranks, slices)
    costs = predict.now(workers, predict.Fleet(SMALL.ranks, tp, workers=2 * tp, hosts=1), tables)
    return {
        **{f"fetched by worker {k}": sum(map(w.reads, tables)) for k, w in enumerate(workers)},
        "into the host, from others": costs.first,
        "within the host": sum(worker.holds_bytes for worker in workers),
        "memory of the rollouts' host": costs.memory,
        **{f"part of rank {k}": table.size_bytes for k, table in enumerate(tables)},
        "memory of the trainer's host": (predict.KEEP + 1) * sum(table.size_bytes for table in tables),
        "collectives": 0,
    }


def measured() -> dict[str, int]:
    """Return the figures of the last of VERSIONS versions."""
    tp = SMALL.tp[0]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        SMALL.config(SMALL.layers).save_pretrained(folder)
        requests = stack.enter_context(counted_requests())
        hub = stack.enter_context(start_server())
        ranks = stack.enter_context(trainers(folder, hub.address, tp))
        rollouts = [stack.enter_context(Engine(folder, tp, f"rollout-{k}", hub.address)) for k in range(2)]
        for rank in ranks:
            heard(rank)
        for version in range(1, VERSIONS + 1):
            requests.clear()
            for rank in ranks:
                tell(rank, version)
            parts = [heard(rank) for rank in ranks]
            reports = update(rollouts, version)
        print(f"requests to the hub for version {VERSIONS}: {requests.total()}, {dict(requests)}", flush=True)
        answers = [each.call("generate") for each in rollouts]
        if answers[0] != answers[1]:
            raise AssertionError(f"two engines with version {VERSIONS} answer differently: {answers}")
        of_trainer = memory([rank.pid for rank in ranks])
        mapped = memory([each.pid for each in rollouts])  # the trainer's as well, since all this is one machine
        of_rollouts = {slab: size for slab, size in mapped.items() if slab not in of_trainer}
        sources = [Counter(report["sources"]) for report in reports]
        local = [sum(size for name, size in each.items() if name.startswith("rollout")) for each in sources]
        return {
            **{f"fetched by worker {k}": sources[k].total() - local[k] for k in range(tp)},
            "into the host, from others": sum(each.total() for each in sources) - sum(local),
            "within the host": sum(local),
            "memory of the rollouts' host": sum(of_rollouts.values()),
            **{f"part of rank {k}": int(part["part"]) for k, part in enumerate(parts)},
            "memory of the trainer's host": sum(of_trainer.values()),
            "collectives": sum(part["collectives"] for part in parts),
        }


def update(rollouts: list[Engine], version: int) -> list[dict[str, Any]]:
    """Update all at once: the first one converts, and the other one uses the result. Return the reports of all their
    workers."""
    reports = []
    for each in rollouts:
        each.call("tensorhub_start_fetch", version, CALL_TIMEOUT_S)
    for each in rollouts:
        each.await_all("state", "ready")
        results = each.call("tensorhub_install", version, CALL_TIMEOUT_S)
        if not all(result["installed"] for result in results):
            raise AssertionError(f"{each.replica} did not install version {version}: {results}")
        reports += [result["report"] for result in results]
        each.await_all("serving", False)
    return reports


class Engine:
    """A vLLM engine, as in engine.py."""

    def __init__(self, folder: str, tp: int, replica: str, hub: str) -> None:
        context = multiprocessing.get_context("forkserver")
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
        context.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"])
        self.replica = replica
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=engines.serve, args=(theirs, folder, tp, "rollouts"))
        self._process.start()
        theirs.close()
        self._answer(START_TIMEOUT_S)
        self.call("tensorhub_connect", {"hub": hub, "run": "sizes", "model": "m", "replica": replica})

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        return self._answer(CALL_TIMEOUT_S)

    def await_all(self, what: str, value: object) -> None:
        """Wait until all workers' polls report this value."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while True:
            polls = self.call("tensorhub_poll")
            if all(poll[what] == value for poll in polls):
                return
            if time.monotonic() > deadline or any(poll["error"] for poll in polls):
                raise AssertionError(f"{self.replica}: {what} is not {value}: {polls}")
            time.sleep(0.02)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"{self.replica} has not answered within {timeout_s:.0f} s")
        succeeded, value = self._pipe.recv()
        if not succeeded:
            raise RuntimeError(value)
        return value

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        workers = children(self.pid)
        self._pipe.close()
        self._process.join(timeout=10.0)
        self._process.kill()
        self._process.join()
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, 9)


def trainers(folder: str, hub: str, slices: int) -> AbstractContextManager[list[subprocess.Popen[str]]]:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return started(
        ["-m", "recipes.bench.sizes.trainer"],
        SMALL.ranks,
        *(SMALL.ranks, slices, folder, hub),
        environment={**meeting, "TENSORHUB_HOST": "trainer", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )


def tell(rank: subprocess.Popen[str], version: int) -> None:
    assert rank.stdin is not None
    rank.stdin.write(f"{version}\n")
    rank.stdin.flush()


def heard(rank: subprocess.Popen[str]) -> dict[str, Any]:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank of the trainer has ended: {rank.wait()}")
    figures: dict[str, Any] = json.loads(line)
    return figures


@contextmanager
def counted_requests() -> Iterator[Counter[str]]:
    """Count what hubs of this process are asked, by kind."""
    counts: Counter[str] = Counter()
    handle = hub_machine.Hub.handle

    def counting(hub: hub_machine.Hub, event: hub_machine.Event, now: float) -> list[hub_machine.Effect]:
        if isinstance(event, hub_machine.Received) and not isinstance(event.message, NOT_OF_A_VERSION):
            counts[type(event.message).__name__] += 1
        return handle(hub, event, now)

    hub_machine.Hub.handle = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        hub_machine.Hub.handle = handle  # type: ignore[method-assign]


def memory(processes: list[int]) -> dict[int, int]:
    """Return the memory of the slabs that these processes and their descendants hold open: by inode, in bytes."""
    found: dict[int, int] = {}
    for process in (each for parent in processes for each in (parent, *children(parent))):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(link).startswith("/memfd:tensorhub"):
                    state = os.stat(link)
                    found[state.st_ino] = state.st_blocks * 512
    return found


def children(process: int) -> list[int]:
    """Return the descendants of any generation."""
    direct = [
        int(child)
        for thread in Path(f"/proc/{process}/task").glob("*/children")
        for child in thread.read_text().split()
    ]
    return [found for child in direct for found in (child, *children(child))]
