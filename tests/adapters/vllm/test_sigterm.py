"""Real engines that are asked to end: one that has the last copy of a version hands it over first, and one that waits
for its first version ends at once, with all its processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")
pytest.importorskip("requests")

from vllm_engines import checkpoint
from vllm_servers import as_a_person, make_two_models, serving, starting

from recipes.servers import environment_for, stop, until
from tensorhub_plugins.core import Client, Server
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.vllm import plugin
from tensorhub_plugins.vllm.names import LEAVING_S, NAME
from tensorhub_plugins.vllm.worker.updater import HAND_OVER_TIMEOUT_S

TIMEOUT_S = 60.0  # of what takes seconds, on a busy machine
WAITS_S = 600.0  # an engine for its first version, by default

LLM = """
if __name__ == "__main__":
    import sys
    from vllm import LLM
    hub, workers, folder = sys.argv[1:]
    extra = {"hub": hub, "run": "r", "model": "actor", "replica": "server"}
    LLM(folder, load_format="tensorhub", model_loader_extra_config=extra,
        tensor_parallel_size=int(workers), max_model_len=256, enforce_eager=True, kv_cache_memory_bytes=64 << 20)
"""


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_at_sigterm_the_last_copy_is_handed_over_and_the_hub_is_told(hub: Server, tmp_path: Path) -> None:
    """vLLM's API server killed the engine at once, and peers were sent to it until its heartbeat was missed."""
    folder, _ = make_two_models(tmp_path)
    extra = {"hub": hub.address, "run": "r", "model": "actor", "replica": "server", "follow": "now"}
    names = {"run": "r", "model": "actor"}
    with (
        Client(hub.address, replica="trainer", **names) as trainer,
        Client(hub.address, replica="peer", **names) as peer,
    ):
        trainer.publish(1, checkpoint(folder))
        with serving(folder, tmp_path, extra) as server:
            (layout,) = set(peer.versions()[0].layouts) - {"checkpoint"}
            trainer.close()
            assert peer.versions()[0].layouts == {layout: ("server/0",)}
            server.process.send_signal(signal.SIGTERM)
            fetched = peer.fetch(1, (layout,), timeout_s=TIMEOUT_S, serve=True)
            server.process.wait(TIMEOUT_S)
            assert peer.versions()[0].layouts == {layout: ("peer/0",)}, "the hub still sends peers there"
            fetched.release()


@contextmanager
def offline(hub: Server, workers: int, folder: Path, out: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A program that makes an `LLM`."""
    program, log = out / "program.py", out / "log"
    program.write_text(LLM)
    with open(log, "wb") as written:
        told = {"env": as_a_person(environment_for(out)), "stdout": written, "stderr": written, "process_group": 0}
        process = subprocess.Popen([sys.executable, program, hub.address, str(workers), str(folder)], **told)
    try:
        yield process, log
    finally:
        stop(process)


def living(group: int) -> list[str]:
    """The processes of this group that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("how", "workers", "number"),
    [("serve", 1, signal.SIGTERM), ("serve", 2, signal.SIGINT), ("LLM", 2, signal.SIGTERM)],
)
def test_an_engine_that_waits_for_its_first_version_ends_at_a_signal(
    how: str, workers: int, number: signal.Signals, hub: Server, tmp_path: Path
) -> None:
    """The API server did not notice it, nor that its core had gone, and waited for ten minutes."""
    folder, _ = make_two_models(tmp_path)

    def here() -> list[Any]:
        return [worker for model in fetch_status(hub.address)["models"] for worker in model["workers"]]

    def end(process: subprocess.Popen[bytes], log: Path) -> None:
        until(lambda: len(here()) == workers and here()[0]["pending"], f"it waits for a version ({log})", process)
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == 128 + number and time.monotonic() - began < TIMEOUT_S < WAITS_S
        until(lambda: not living(process.pid), "no process is left")
        assert here() == []
        said = log.read_text()
        stores = tuple(set(re.findall(r"vllm_dist_\w+", said)))
        assert not [file for file in os.listdir("/dev/shm") if file.startswith(stores)], "a worker was killed"
        assert said.count(f"{number.name}: the engine ends before it has started") == 1 and "Traceback" not in said

    if how == "serve":
        extra = {"hub": hub.address, "run": "r", "model": "actor", "replica": "server"}
        with starting(folder, tmp_path, extra, "--tensor-parallel-size", str(workers)) as (server, _):
            end(server.process, server.log)
    else:
        with offline(hub, workers, folder, tmp_path) as (process, log):
            end(process, log)


def test_who_ends_an_engine_of_ours_gives_it_the_time_to_leave() -> None:
    given: list[Any] = []

    class CoreEngineProcManager:
        def __init__(self, count: int, *, vllm_config: Any) -> None:
            pass

        def shutdown(self, timeout: float | None = None) -> None:
            given.append(timeout)

    module: Any = ModuleType("utils")
    module.CoreEngineProcManager = CoreEngineProcManager
    plugin._add_time_to_leave(module)
    plugin._add_time_to_leave(module)  # once
    for load_format in (NAME, "auto"):
        config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
        for timeout in (None, 0, 20):
            CoreEngineProcManager(1, vllm_config=config).shutdown(timeout=timeout)
    assert given == [LEAVING_S, LEAVING_S, 20 + LEAVING_S, None, 0, 20] and LEAVING_S > HAND_OVER_TIMEOUT_S


def test_the_time_that_vllm_itself_gives_a_core_is_not_cut_short() -> None:
    """vLLM gives it to cores that would have none, from 0.29 on with ROCm, from 0.33 on by its environment: with the
    time to leave they had some, and were killed while they freed their device. The control: requests have time."""
    given: list[Any] = []

    class CoreEngineProcManager:
        def __init__(self, vllm_config: Any) -> None:
            self._request_shutdown_timeout = vllm_config.shutdown_timeout

        def shutdown(self, timeout: float | None = None) -> None:
            given.append(module.get_engine_process_shutdown_timeout(self._request_shutdown_timeout, timeout))

    module: Any = ModuleType("utils")
    module.CoreEngineProcManager = CoreEngineProcManager
    module.get_engine_process_shutdown_timeout = lambda request, process: 60 if request == process == 0 else process
    plugin._add_time_to_leave(module)
    for load_format in (NAME, "auto"):
        for shutdown_timeout in (0, 20):
            load_config = SimpleNamespace(load_format=load_format)
            config = SimpleNamespace(load_config=load_config, shutdown_timeout=shutdown_timeout)
            CoreEngineProcManager(config).shutdown(timeout=shutdown_timeout)
    assert given == [60 + LEAVING_S, 20 + LEAVING_S, 60, 20]
