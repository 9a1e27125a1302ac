"""What cuda_ipc says to libcuda: names and arguments as in NVIDIA's header, against a library that stands for it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tensorhub_plugins.core.transports.cuda_ipc import driver
from tensorhub_plugins.core.transports.cuda_ipc.driver import Allocation, CudaIpc, NotShareable

SOURCE = Path(__file__).resolve().parents[2] / "support" / "fake_libcuda.c"
LEGACY, POOLED, MAPPED, SIZE_BYTES = 0x700000000000, 0x710000000000, 0x720000000000, 0x5000000000
SECOND = SimpleNamespace(name="cuda:1")
HANDLE = bytes(at if at % 3 else 0 for at in range(64))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    found, compiler = find_spec("triton"), shutil.which("cc")
    if found is None or found.origin is None or compiler is None:
        pytest.skip("no cuda.h, which comes with triton, or no C compiler")
    include = Path(found.origin).parent / "backends" / "nvidia" / "include"
    if not (include / "cuda.h").exists():
        pytest.skip("this triton has no cuda.h")
    library = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-I", include, "-o", library, SOURCE], check=True, timeout=100)
    return str(library)


@pytest.fixture
def ipc(library, monkeypatch):
    monkeypatch.setattr(driver, "_tensor_over", lambda device, address, size: SimpleNamespace(data_ptr=lambda: address))
    return CudaIpc(library)


def test_a_handle_is_of_the_whole_allocation(ipc):
    assert ipc.export(SECOND, LEGACY + 12345) == Allocation(LEGACY, SIZE_BYTES, HANDLE)
    assert ipc.device_id(SECOND) == "29292929-2929-2929-2929-292929292929"  # 41


def test_memory_without_a_handle_is_refused_with_what_to_do(ipc):
    with pytest.raises(NotShareable, match="expandable segments .*allocate the weights without"):
        ipc.export(SECOND, POOLED)


def test_what_is_opened_is_closed(ipc, library):
    fake = ctypes.CDLL(library)
    opened = ipc.open(SECOND, Allocation(1, SIZE_BYTES, HANDLE))
    assert opened.data_ptr() == MAPPED and fake.fake_open() == 1
    ipc.close(SECOND, opened)
    assert fake.fake_open() == 0 and fake.fake_contexts() == 0


def test_an_error_of_cuda_is_said_with_its_name(ipc, library):
    with pytest.raises(NotShareable, match="cuIpcOpenMemHandle_v2: error 217, peer access is not supported"):
        ipc.open(SECOND, Allocation(1, SIZE_BYTES, bytes(64)))
    assert ctypes.CDLL(library).fake_contexts() == 0


def test_more_than_there_is_is_refused_and_closed(ipc, library):
    with pytest.raises(NotShareable, match=f"the source says {SIZE_BYTES + 1}"):
        ipc.open(SECOND, Allocation(1, SIZE_BYTES + 1, HANDLE))
    assert ctypes.CDLL(library).fake_open() == 0


def test_a_thread_that_has_no_context_gets_the_devices_own(ipc):
    """The control: with another device's the library refuses."""
    found = []

    def export(device):
        try:
            found.append(ipc.export(device, LEGACY))
        except NotShareable as error:
            found.append(str(error))

    for device in (SECOND, SimpleNamespace(name="cuda:0")):
        thread = threading.Thread(target=export, args=(device,))
        thread.start()
        thread.join(60)
    assert found[0].base == LEGACY and "error 201" in found[1]


def test_no_handle_of_another_length_is_taken_from_the_wire():
    for size in (0, 63, 65):
        wire = msgspec.msgpack.encode([1, 2, bytes(size)])
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(wire, type=Allocation)


def test_a_process_that_was_forked_has_another_name(monkeypatch):
    name = driver.process_name()
    assert driver.process_name() == name
    monkeypatch.setattr(driver.os, "getpid", lambda: 1)
    assert driver.process_name() != name


def test_without_the_library_there_is_none():
    assert CudaIpc.unavailable("libcuda-that-is-not-there.so") == (
        "there is no libcuda-that-is-not-there.so, which comes with NVIDIA's driver"
    )
