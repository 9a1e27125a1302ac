"""vLLM's processes end when the actor that started them is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

WORKER = """
import os, sys, time
from tensorhub_plugins.vllm.orphans import end_with_owner
end_with_owner()
print("watching", os.getpid(), flush=True)
time.sleep(600)
"""
START = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
CORE = START  # as vLLM's engine core: started by the actor, starts the worker, notices nothing
ACTOR = f"from tensorhub_plugins.vllm.orphans import own_engines; own_engines(); {START}"
FORGETFUL = START  # an actor that has not said who it is


def start(*command: str) -> subprocess.Popen[str]:
    """A chain of processes, each started by the one before; the last is a worker that watches."""
    process = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said, process.worker = process.stdout.readline().split()  # type: ignore[attr-defined]
    assert said == "watching"
    return process


def is_silent_within(process: subprocess.Popen[str], deadline_s: float) -> bool:
    """Whether the last process that could write to the pipe has ended."""
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], deadline_s)[0]) and process.stdout.read() == ""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux 5.3)")
@pytest.mark.parametrize("chain", [(ACTOR, WORKER), (ACTOR, CORE, WORKER)], ids=["one process", "core and worker"])
def test_they_end_with_the_actor(chain: tuple[str, ...]) -> None:
    actor = start(*chain)
    assert not is_silent_within(actor, 0.2)
    actor.kill()
    actor.wait()
    assert is_silent_within(actor, 60)


def test_the_check_above_sees_those_who_stay() -> None:
    actor = start(FORGETFUL, WORKER)
    assert actor.stdout is not None
    actor.kill()
    actor.wait()
    assert not is_silent_within(actor, 0.5)
    os.kill(int(actor.worker), signal.SIGKILL)  # type: ignore[attr-defined]
    assert is_silent_within(actor, 60)
