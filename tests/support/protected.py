"""Devices of torch's PrivateUse1 key whose memory no host code can touch: our own, or torch's reference device.

    protected     ours, from protected_device.cpp: made once for each torch, and kept under .envs
    openreg       torch's own `torch_openreg`, where it is installed (it comes with torch's sources only)

A process takes one of them, for good. So this is for processes of their own: protected_cases.py, and peers.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
import types
from importlib.util import find_spec
from pathlib import Path

import torch

from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import flat_bytes, shaped_as

SOURCE = Path(__file__).with_name("protected_device.cpp")
CACHE = Path(__file__).resolve().parents[2] / ".envs"
DEVICES = ("protected", "openreg")
COMPILE_S = 600  # half a minute on a quiet core

_loaded: list[str] = []


def missing(device: str) -> str | None:
    """Return why there is no such device here, or None."""
    if device == "openreg":
        return None if find_spec("torch_openreg") else "torch_openreg is not installed: torch's sources have it"
    return None if _compiler() else "no C++ compiler"


def build() -> Path:
    """Build the library with the device, or find it. Concurrent processes wait for one build."""
    compiler = _compiler()
    assert compiler is not None
    known = f"{torch.__version__} {torch.compiled_with_cxx11_abi()} {compiler}".encode() + SOURCE.read_bytes()
    CACHE.mkdir(exist_ok=True)
    library = CACHE / f"protected-{hashlib.sha256(known).hexdigest()[:16]}.so"
    with open(CACHE / "protected.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                made = Path(folder) / library.name
                subprocess.run([compiler, SOURCE, "-o", made, *_options()], check=True, timeout=COMPILE_S)
                made.rename(library)
    return library


def take(device: str) -> str:
    """Give this process the device from now on; return its name, as torch takes it."""
    if not _loaded:
        if device == "openreg":
            __import__("torch_openreg")
        else:
            torch.ops.load_library(build())
            torch.utils.rename_privateuse1_backend(device)
            torch._register_device_module(device, types.ModuleType(f"torch.{device}"))
        _loaded.append(device)
    assert _loaded == [device]
    return device


def adopt(tensors: dict[str, torch.Tensor]) -> Slab:
    """Make a slab of our device whose bytes are those of these host tensors, so that tests see what arrives in them."""
    take("protected")
    over = torch.ops.protected_device.over
    return Slab.adopt({name: shaped_as(each, over(flat_bytes(each))) for name, each in tensors.items()})


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def _options() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    libraries = Path(torch.__file__).parent / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [option for path in include_paths() for option in ("-isystem", path)]
    return ["-std=c++17", "-shared", "-fPIC", abi, *includes, f"-L{libraries}", "-ltorch_cpu", "-lc10"]
