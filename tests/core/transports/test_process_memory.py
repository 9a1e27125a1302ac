"""Another process' memory, read by address: the bytes asked for, or an error; never bytes from elsewhere."""

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest

from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.transports.shm import process_memory as _process
from tensorhub_plugins.core.transports.shm.process_memory import ProcessMemory, extents_of

pytestmark = pytest.mark.skipif(not _process.available(), reason="this system has no process_vm_readv")


def in_another_process(arrays):
    """A process that has these arrays in its memory: its pid, where they lie; ends with the block."""
    return contextlib.closing(_Elsewhere(arrays))


HOLD = """
import ctypes, pickle, sys
arrays = [bytearray(array) for array in pickle.load(sys.stdin.buffer)]
places = [(ctypes.addressof(ctypes.c_char.from_buffer(array)), len(array)) for array in arrays]
pickle.dump(places, sys.stdout.buffer)
sys.stdout.flush()
sys.stdin.read()
"""


class _Elsewhere:
    def __init__(self, arrays):
        self.process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        pickle.dump(arrays, self.process.stdin)
        self.process.stdin.flush()
        self.extents = pickle.load(self.process.stdout)

    def close(self):
        with self.process:
            self.process.kill()


def test_any_range_into_any_views():
    random = np.random.default_rng(1)
    sizes = [1, 5000, 3, 700, *[7] * (2 * _process.IOV_MAX + 5), 64 << 10]
    arrays = [random.bytes(size) for size in sizes]
    whole = b"".join(arrays)
    with in_another_process(arrays) as there:
        memory = ProcessMemory(there.process.pid, _process.pack(there.extents), len(whole))
        memory.probe()
        for start, stop in [(0, len(whole)), (0, 1), (5001, 5003), (5700, 5712), (17, 17), (4000, len(whole) - 1)]:
            cuts = sorted({start, stop, *random.integers(start, stop + 1, 3 * _process.IOV_MAX).tolist()})
            parts = [bytearray(b - a) for a, b in itertools.pairwise(cuts)]
            memory.read(start, stop, extents_of([memoryview(part) for part in parts]))
            assert b"".join(parts) == whole[start:stop]
        there.process.kill()
        there.process.wait()
        with pytest.raises(OSError):
            memory.read(0, 1, extents_of([memoryview(bytearray(1))]))
        with pytest.raises(OSError):
            memory.probe()


def test_memory_that_is_not_there():
    with in_another_process([b"abc"]) as there:
        memory = ProcessMemory(there.process.pid, _process.pack([*there.extents, (4096, 10)]), 13)
        with pytest.raises(OSError, match="[Bb]ad address"):
            memory.probe()
        part = bytearray(13)
        with pytest.raises(OSError):
            memory.read(0, 13, extents_of([memoryview(part)]))


@pytest.mark.parametrize(
    "extents",
    [b"x" * 15, _process.pack([(1, 9)]), _process.pack([(1, 5), (1, 6)]), _process.pack([(1, 2**64 - 1), (1, 11)])],
)
def test_no_source_is_believed(extents):
    with pytest.raises(ProtocolError):
        ProcessMemory(os.getpid(), extents, 10)


def test_others_are_let_in_where_yama_stands_guard(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(_process, "_libc", lambda: types.SimpleNamespace(prctl=lambda *a: calls.append(a)))
    scope_file = tmp_path / "ptrace_scope"
    _process.let_others_read(scope_file)  # no Yama
    for scope in ("0\n", "2\n"):  # nothing to ask for, nothing to be had
        scope_file.write_text(scope)
        _process.let_others_read(scope_file)
    assert calls == []
    scope_file.write_text("1\n")
    _process.let_others_read(scope_file)
    assert [call[0] for call in calls] == [_process.PR_SET_PTRACER]
