"""The digest of a device's memory is the host's, bit for bit. The kernel runs in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import xxhash

from tensorhub_plugins.core.memory import xxh3
from tensorhub_plugins.core.testing.simulated import Simulation

SCRIPT = """
import sys
import torch, xxhash
from tensorhub_plugins.core.memory import xxh3, xxh3_kernel

generator, ran = torch.Generator().manual_seed(1), []
of_blocks = xxh3_kernel.lanes_of_blocks
xxh3_kernel.lanes_of_blocks = lambda *given: ran.append(given) or of_blocks(*given)
for segment, size in {cases}:
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    parts = [bytes(flat[start:start + segment].tolist()) for start in range(0, size, segment)]
    expected = b"".join(map(xxhash.xxh3_128_digest, parts))
    before = len(ran)
    assert xxh3.digests_of_flat(flat, segment) == expected, (segment, size)
    assert len(ran) > before, (segment, size)
    moved = torch.cat([torch.zeros({shift}, dtype=torch.uint8), flat])[{shift}:]
    before = len(ran)
    assert xxh3.digests_of_flat(moved, segment) == expected, (segment, size)
    assert ({shift} % 8 == 0) == (len(ran) > before)
print(len(ran))
"""


def interpret(cases: list[tuple[int, int]], shift: int = 3, **changes: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.replace("{cases}", repr(cases)).replace("{shift}", str(shift))
    for before, after in changes.items():
        script = script.replace(before, after)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)


def test_the_kernel_says_what_xxhash_says() -> None:
    """From 241 bytes on, at every length of the last block and stripe, and with a shorter segment at the end."""
    pytest.importorskip("triton")
    tails = [(248 + 8 * k, 248 + 8 * k) for k in range(0, 230, 7)]
    odd = [(1 << 20, size) for size in (241, 255, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 3333, 100_003)]
    several = [(1024, 10 * 1024), (1032, 5 * 1032 + 100), (4096, 9 * 4096 + 300), (64 << 10, (256 << 10) + 7)]
    ran = interpret([*tails, *odd, *several, (4 << 20, (4 << 20) + 12_345)])
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= len(tails) + len(odd) + len(several) + 1


def test_a_digest_that_is_wrong_is_found() -> None:
    """The control: one bit of what the kernel has summed up."""
    pytest.importorskip("triton")
    ran = interpret([(2048, 2048)], **{"or of_blocks(*given)": "or of_blocks(*given) ^ 1"})
    assert ran.returncode == 1 and "AssertionError: (2048, 2048)" in ran.stderr


def test_memory_that_is_aligned_stays_with_the_kernel() -> None:
    pytest.importorskip("triton")
    ran = interpret([(2048, 5000)], shift=8)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("size", [0, 1, 240, 241, 5000])
def test_on_the_host_xxhash_itself_is_asked(size: int) -> None:
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8)
    content = bytes(flat.tolist())
    expected = b"".join(xxhash.xxh3_128_digest(content[start : start + 1000]) for start in range(0, size, 1000))
    assert xxh3.digests_of_flat(flat, 1000) == expected


def test_without_triton_a_devices_memory_is_brought_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxh3, "find_spec", lambda name: None)
    with Simulation(0) as simulation:
        flat = torch.randint(0, 256, (5000,), dtype=torch.uint8)
        expected = xxh3.digests_of_flat(flat, 1000)
        assert xxh3.digests_of_flat(simulation.put(flat), 1000) == expected
        simulation.check()


@pytest.mark.parametrize("size", [241, 256, 257, 1000, 1023, 1024])
def test_the_hosts_part_alone(size: int) -> None:
    """Of up to one block there is nothing for the kernel to do."""
    content = np.frombuffer(np.random.default_rng(size).bytes(3 * size), np.uint8).reshape(3, size)
    lanes = np.tile(np.array(xxh3.LANES, np.uint64), (3, 1))
    assert xxh3.finish(lanes, content, size) == b"".join(xxhash.xxh3_128_digest(each) for each in content)
