"""Allocated memory: laid out as the table says, passed on by its file, gone with its last user."""

import fcntl
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch
from slabs import allocated, raw, stream
from transport_suite import sample_tensors

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import ALIGNMENT_BYTES, Manifest, TensorSpec, TensorTable
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec("x", "float99", (2,), 8), "makes no such tensor"),
        (TensorSpec("x", "quint8", (8,), 8), "makes no such tensor"),
        (TensorSpec("x", "nn", (2,), 8), "makes no such tensor"),
        (TensorSpec("x", "float32", (2,), 9), "claims 9 bytes"),
        (TensorSpec("x", "float32", (-1, -1), 4), "claims"),
        (TensorSpec("x", "float32", (2, 3), 24, (3, 2)), "strides"),
        (TensorSpec("x", "float32", (2, 3), 24, (1, 1000)), "strides"),
        (TensorSpec("x", "float32", (2, 3), 24, (1,)), "strides"),
    ],
)
def test_specs_of_a_peer_that_do_not_hold_together(spec, reason):
    """Memory is handed out by what they say, so nothing of it is believed."""
    with pytest.raises(UsageError, match=reason) as error:
        Slab.allocate([spec])
    assert "'x'" in str(error.value)


@pytest.mark.parametrize("is_a_block", [True, False])
def test_huge_pages_are_asked_for(is_a_block):
    """B10. The control: for what is mapped without a word there are none."""
    with Slab.allocate([spec_of("a", torch.zeros(1000))], pin=False) as slab:
        mapped = mmap.mmap(slab.shared_fd, mmap.PAGESIZE)
        memory = slab.tensors()["a"] if is_a_block else torch.frombuffer(mapped, dtype=torch.uint8)
        about = Path("/proc/self/smaps").read_text().partition(f"{memory.data_ptr():x}-")[2]
        flags = about.partition("VmFlags:")[2].splitlines()
        if not flags:
            pytest.skip("this kernel does not tell")
        assert ("hg" in flags[0].split()) == is_a_block


def test_a_name_twice():
    with pytest.raises(UsageError, match="'x' is there twice"):
        Slab.allocate([TensorSpec("x", "int8", (1,), 1), TensorSpec("x", "int8", (2,), 2)])


def test_allocated_tensors_are_as_specified():
    tensors = sample_tensors(seed=4)
    with allocated(tensors) as slab:
        for name, tensor in slab.tensors().items():
            assert spec_of(name, tensor) == spec_of(name, tensors[name])
            assert raw(tensor) == raw(tensors[name])
            assert tensor.data_ptr() % ALIGNMENT_BYTES == 0


def test_the_file_holds_the_tensors_where_the_table_says():
    """Another process knows the block's layout from the manifest alone."""
    tensors = sample_tensors(seed=5)
    with allocated(tensors) as slab:
        table = slab.specs
        with mmap.mmap(slab.shared_fd, table.block_size_bytes, prot=mmap.PROT_READ) as block:
            for spec, offset in zip(table, table.block_offsets, strict=True):
                assert offset % ALIGNMENT_BYTES == 0
                assert block[offset : offset + spec.size_bytes] == raw(tensors[spec.name])
            whole = b"".join(block[span.slice] for span in table.spans)
            assert whole == stream(tensors)


def test_tensors_of_aligned_sizes_are_one_span():
    specs = TensorTable.of(TensorSpec(f"t{i}", "uint8", (64 * i,), 64 * i) for i in range(9))
    assert specs.spans == ((0, 64 * 36, 0),)
    odd = TensorTable.of(
        [TensorSpec("a", "uint8", (65,), 65), TensorSpec("b", "uint8", (1,), 1), TensorSpec("c", "uint8", (0,), 0)]
    )
    assert odd.spans == ((0, 65, 0), (65, 1, 128))
    assert (odd.block_offsets, odd.block_size_bytes) == ((0, 128, 192), 192)
    assert (TensorTable.of([]).block_offsets, TensorTable.of([]).block_size_bytes) == ((), 0)


def test_the_file_cannot_shrink_and_leaves_nothing_behind():
    with Slab.allocate([TensorSpec("a", "uint8", (5000,), 5000)]) as slab:
        with pytest.raises(PermissionError):
            os.ftruncate(slab.shared_fd, 0)
        assert fcntl.fcntl(slab.shared_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        assert os.fstat(slab.shared_fd).st_nlink == 0  # has no name anywhere: gone with the last process that has it
        assert not os.get_inheritable(slab.shared_fd)


def test_without_memfd_it_is_private_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    tensors = sample_tensors(seed=6)
    with allocated(tensors) as slab:
        assert slab.shared_fd is None
        assert b"".join(slab.readable(0, slab.size_bytes)) == stream(tensors)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is for hosts without CUDA")
def test_pinning_needs_cuda():
    with pytest.raises(UsageError, match="no CUDA device"):
        Slab.allocate([TensorSpec("a", "uint8", (5,), 5)], pin=True)


def test_an_allocated_slab_keeps_the_very_table_of_a_manifest():
    with Slab.adopt(sample_tensors(seed=11)) as source:
        table = Manifest.decode(source.manifest().encoded).tensors
        assert table is source.specs
    with Slab.allocate(table) as slab, Slab.allocate(list(table)) as other, Slab.allocate(reversed(table)) as third:
        assert slab.specs is table
        assert other.specs is table and third.specs is table


def test_no_descriptor_is_lost():
    gc.collect()  # what earlier tests have left
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        allocated(sample_tensors(seed=9)).close()
        Slab.allocate([TensorSpec("a", "uint8", (5,), 5)])  # dropped without close
        with pytest.raises(UsageError):
            Slab.allocate([TensorSpec("a", "uint8", (5,), 6)])
    assert sorted(os.listdir("/proc/self/fd")) == before
