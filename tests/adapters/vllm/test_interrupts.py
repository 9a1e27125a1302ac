"""Which signals end an engine that starts, and how."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_plugins.vllm import interrupts, plugin
from tensorhub_plugins.vllm.interrupts import ends_at_signals
from tensorhub_plugins.vllm.worker import extension


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As an interpreter begins with them, and afterwards as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def swallows() -> Iterator[None]:
    """As the context of vLLM's socket."""
    with contextlib.suppress(KeyboardInterrupt):
        yield


@pytest.mark.parametrize(
    ("number", "interactive", "error"),
    [
        (signal.SIGTERM, False, SystemExit),
        (signal.SIGTERM, True, SystemExit),
        (signal.SIGINT, False, SystemExit),
        (signal.SIGINT, True, KeyboardInterrupt),
    ],
)
def test_a_signal_ends_it_and_the_handlers_are_as_before(number: int, interactive: bool, error: type) -> None:
    before = signal.getsignal(number)
    with pytest.raises(error) as caught, ends_at_signals(interactive=interactive), swallows():
        signal.raise_signal(number)
    assert signal.getsignal(number) == before
    assert error is KeyboardInterrupt or caught.value.code == 128 + number


def test_the_control_a_keyboard_interrupt_is_swallowed() -> None:
    with swallows():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("is_core", [True, False])
def test_a_core_that_ends_does_not_look_for_garbage(is_core: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM killed those that did so for more than 5 s, and their files stayed in /dev/shm."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if is_core else None)
    with pytest.raises(SystemExit), ends_at_signals():
        signal.raise_signal(signal.SIGTERM)
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    assert is_frozen == is_core


@pytest.mark.parametrize("name", ["VllmWorker-0", "MainProcess"])
def test_a_worker_that_ends_does_not_look_for_garbage_either(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an engine in the process of its caller, which makes the next one."""
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(name=name))
    extension._shutdown(lambda: None, SimpleNamespace())
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    assert is_frozen == name.startswith("VllmWorker")


def test_what_fails_by_itself_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="mine"), ends_at_signals():
        raise ValueError("mine")


def test_whoever_has_a_handler_of_its_own_keeps_it() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ends_at_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGTERM]


def test_the_handlers_of_asyncio_and_vllm_only_end_a_process() -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    interrupt.__module__ = "vllm.entrypoints.launchers.api_server.entry"
    signal.signal(signal.SIGTERM, interrupt)
    with pytest.raises(SystemExit), ends_at_signals(), swallows():
        signal.raise_signal(signal.SIGTERM)

    async def start() -> None:
        with ends_at_signals():
            signal.raise_signal(signal.SIGINT)  # asyncio's own cancels this task, which awaits nothing

    with pytest.raises(SystemExit):
        asyncio.run(start())


def test_in_another_thread_nothing_changes() -> None:
    def start() -> Any:
        with ends_at_signals():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(start).result() == signal.SIG_DFL


SERVER = """
import multiprocessing, os, signal, sys, time
from tensorhub_plugins.vllm.interrupts import end_with_parent

def core():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(os.write(1, b"leaves\\n") == 0))  # it may be printing
    if not is_late:
        end_with_parent()
    print(os.getpid(), flush=True)
    try:
        while is_late:
            os.kill(parent, 0)
            time.sleep(0.01)
    except ProcessLookupError:
        end_with_parent()
    while True:  # in turns: a signal of its own thread just before a long one would wait for that one's end
        time.sleep(0.01)

parent, is_late = os.getpid(), sys.argv[2] == "True"

multiprocessing.get_context("fork").Process(name=sys.argv[1], target=core).start()
time.sleep(600)
"""


NAMES = ["EngineCore", "EngineCore_DP1", "ApiServer_1", "APIServer_DPRank_1", "VLLM_DP_Coordinator"]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux 5.3)")
@pytest.mark.parametrize("is_late", [False, True], ids=["", "before it looks"])
@pytest.mark.parametrize("name", [*NAMES, "Mine"])
def test_a_core_ends_with_the_server_that_was_killed(name: str, is_late: bool) -> None:
    """It followed on, and readers got versions of two engines of one name when the server was started again. The
    control: a process of the user's own stays."""
    command = [sys.executable, "-c", SERVER, name, str(is_late)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        core = int(server.stdout.readline())
        server.kill()
        server.wait()
        if name == "Mine":
            assert not select.select([server.stdout], [], [], 0.5)[0]
            os.kill(core, signal.SIGTERM)
        assert server.stdout.read() == "leaves\n"


@pytest.mark.parametrize("is_forked", [False, True])
@pytest.mark.parametrize(("load_format", "ends"), [("tensorhub", True), ("auto", False)])
def test_the_coordinator_of_data_parallel_ranks_is_started_as_one_that_ends(
    load_format: str, ends: bool, is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed when its server was killed. The control: an engine that has nothing of the store."""
    coordinator = pytest.importorskip("vllm.v1.engine.coordinator")
    made: list[Any] = []
    monkeypatch.setattr(coordinator.DPCoordinatorProc, "run_coordinator", made.append)
    monkeypatch.setattr(interrupts, "end_with_parent", lambda: made.append("ends"))
    monkeypatch.delattr(interrupts.coordinate, "original", raising=False)

    @contextlib.contextmanager
    def launch_core_engines(vllm_config: Any) -> Iterator[Any]:
        yield coordinator.DPCoordinatorProc.run_coordinator

    utils = SimpleNamespace(launch_core_engines=launch_core_engines)
    plugin._add_end_of_coordinator(utils)
    config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
    with utils.launch_core_engines(config) as target:
        if is_forked:
            target("runs")
    if not is_forked:
        monkeypatch.delattr(interrupts.coordinate, "original", raising=False)  # of this process
        target("runs")
    assert made == ["ends", "runs"][not ends :]
    assert coordinator.DPCoordinatorProc.run_coordinator == made.append


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm.entrypoints.cli.serve", "vllm.v1.engine.core_client"])
def test_what_starts_the_coordinator_is_found_by_those_that_vllm_has_imported_before(name: str) -> None:
    """`vllm serve` imports it before it loads plug-ins, and started the coordinator past ours."""
    pytest.importorskip("vllm")
    program = f"""
from importlib import import_module
module = import_module({name!r})
from vllm.plugins import load_general_plugins
load_general_plugins()
print(hasattr(module.launch_core_engines, "tensorhub"))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.stdout.splitlines()[-1:] == ["True"], ended.stderr
