"""No pointer of a device is ever used as one of the host: proved on devices whose addresses nobody may touch.

They are known to torch (PrivateUse1) and to nothing of ours: so the store treats every accelerator that is not CUDA's.
The cases are in protected_cases.py. They run in a process of their own, as a device is taken for good, and as whoever
does touch it dies of SIGSEGV: Python's faulthandler says where.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import protected
import pytest

SUPPORT = Path(protected.__file__).parent
CHILD_S = 900.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(CHILD_S + protected.COMPILE_S)]

PROGRAM = """
import ctypes, protected, torch
from tensorhub_plugins.core.device import devices
from tensorhub_plugins.core.memory.slab import Slab

def adopt():
    with Slab.adopt({"w": weights.clone()}) as slab:
        slab.manifest()

weights = torch.arange(1000).to(protected.take(DEVICE))
adopt()
print("as it should", flush=True)
TOUCH
print("and beyond")
"""


@pytest.fixture(params=protected.DEVICES)
def device(request):
    if reason := protected.missing(request.param):
        pytest.skip(reason)
    if request.param == "protected":
        protected.build()  # with an error of its own, outside of what is judged
    return request.param


def run(device: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PROTECTED_DEVICE": device}
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=SUPPORT.parents[1], capture_output=True, text=True,
        timeout=CHILD_S,
    )  # fmt: skip


def test_the_store_moves_what_no_host_code_can_touch(device):
    done = run(device, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUPPORT / "protected_cases.py"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "touch",
    [
        "ctypes.string_at(weights.data_ptr(), 1)",
        "ctypes.memset(weights.data_ptr(), 0, 1)",
        "devices._Torch.of = lambda self, tensor: None; adopt()",
    ],
    ids=["a read", "a write", "the store takes it for the host's"],
)
def test_who_touches_it_dies(device, touch):
    """The controls: of the device, and of the cases, which could not end well if the store used a pointer."""
    done = run(device, "-c", PROGRAM.replace("DEVICE", repr(device)).replace("TOUCH", touch))
    assert done.stdout == "as it should\n", done.stderr
    assert done.returncode == -signal.SIGSEGV
