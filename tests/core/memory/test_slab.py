"""Slabs: every tensor becomes the stream it should, and back, in place; what cannot work is refused by name."""

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import (
    DIGEST_SIZE_BYTES,
    Manifest,
    TensorSpec,
)
from tensorhub_plugins.core.memory import slab as slab_module
from tensorhub_plugins.core.memory.slab import ALIGNMENT_BYTES, Slab, copy_views, digest_of, place, spans, spec_of
from tensorhub_plugins.core.testing import blank_like, sample_tensors

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def raw(tensor):
    """A dense tensor's bytes in memory order, by its address alone."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def stream(tensors):
    """The stream by its definition: the bytes in the order of the names."""
    return b"".join(raw(tensors[name]) for name in sorted(tensors))


def allocated(tensors):
    slab = Slab.allocate(spec_of(name, tensor) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        slab.write(name, tensor)
    return slab


def staged(tensors):
    """A slab that takes the way of device memory, on the CPU: through host buffers, committed at the end."""
    slab = Slab.adopt(tensors)
    slab._staging = torch.device("cpu")
    return slab


KINDS = {"adopted": Slab.adopt, "allocated": allocated, "staged": staged}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


# --- the stream ---


def test_stream_of_every_dtype(make):
    tensors = sample_tensors(seed=1)
    assert len({tensor.dtype for tensor in tensors.values()}) >= 30
    with make(tensors) as slab:
        assert [spec.name for spec in slab.specs] == sorted(tensors)
        assert b"".join(slab.readable(0, slab.size_bytes)) == stream(tensors)
        assert slab.size_bytes == len(stream(tensors))


def test_float8_float4_complex_and_small_integers_are_among_them():
    names = {spec.dtype for spec in Slab.adopt(sample_tensors(seed=1)).specs}
    assert {
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "bool",
        "complex64",
        "uint16",
        "uint4",
        "int64",
    } <= names


def test_any_range_is_that_part_of_the_stream(make):
    tensors = sample_tensors(seed=2)
    whole = stream(tensors)
    with make(tensors) as slab:
        for start in (0, 1, 14, 15, 16, len(whole) // 2, len(whole)):
            for stop in (start, start + 1, start + 100, len(whole)):
                if start <= stop <= len(whole):
                    assert b"".join(slab.readable(start, stop)) == whole[start:stop]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_writing_a_range_changes_that_range_and_nothing_else(data):
    sizes = data.draw(st.lists(st.integers(0, 200), max_size=8))
    tensors = {f"t{i}": torch.full((n,), i, dtype=torch.uint8) for i, n in enumerate(sizes)}
    with KINDS[data.draw(st.sampled_from(sorted(KINDS)))](tensors) as slab:
        whole = bytearray(stream(tensors))
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        new = data.draw(st.binary(min_size=stop - start, max_size=stop - start))
        with slab.writable(start, stop) as views:
            copy_views([memoryview(new)], views)
        whole[start:stop] = new
        assert b"".join(slab.readable(0, len(whole))) == whole
        assert stream(slab.tensors()) == whole


def test_several_ranges_at_once(make):
    tensors = {"a": torch.zeros(10, dtype=torch.uint8), "b": torch.zeros(10, dtype=torch.uint8)}
    with make(tensors) as slab:
        with slab.writable_ranges([(15, 18), (2, 4), (9, 11)]) as views:
            copy_views([memoryview(b"abcdefg")], views)
        assert b"".join(slab.readable(0, 20)) == b"\0\0de\0\0\0\0\0fg\0\0\0\0abc\0\0"


def test_staged_memory_is_untouched_when_receiving_fails():
    tensors = {"a": torch.zeros(10, dtype=torch.uint8)}
    slab = staged(tensors)
    with pytest.raises(KeyError), slab.writable(0, 10) as views:
        views[0][:] = b"x" * 10
        raise KeyError
    assert raw(tensors["a"]) == bytes(10)
    with slab.writable(0, 10) as views:  # and the same without the failure is committed
        views[0][:] = b"x" * 10
    assert raw(tensors["a"]) == b"x" * 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory():
    tensors = {name: tensor.cuda() for name, tensor in sample_tensors(seed=3).items() if tensor.numel()}
    expected = stream({name: tensor.cpu() for name, tensor in tensors.items()})
    with Slab.adopt(tensors) as slab:
        assert b"".join(slab.readable(0, slab.size_bytes)) == expected
        with slab.writable(5, 500) as views:
            copy_views([memoryview(bytes(495))], views)
        whole = expected[:5] + bytes(495) + expected[500:]
        assert b"".join(slab.readable(0, slab.size_bytes)) == whole
        assert digest_of([memoryview(whole)]) == slab.digest(0, slab.size_bytes)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 11)])
def test_ranges_outside_the_stream(make, start, stop):
    with make({"a": torch.zeros(10, dtype=torch.uint8)}) as slab:
        with pytest.raises(UsageError, match="outside"):
            slab.readable(start, stop)
        with pytest.raises(UsageError, match="outside"), slab.writable(start, stop):
            pass


def test_copy_views_of_different_cuts():
    source = [memoryview(b"ab"), memoryview(b""), memoryview(b"cdefg"), memoryview(b"hij")]
    target = bytearray(10)
    view = memoryview(target)
    copy_views(source, [view[:3], view[3:3], view[3:9], view[9:]])
    assert target == b"abcdefghij"


@pytest.mark.parametrize("kind", KINDS)
def test_slabs_made_in_inference_mode_work_outside_of_it(kind):
    """Engines call from inference mode, whose tensors nobody outside of it can write, serving threads included."""
    with torch.inference_mode():
        weight = torch.zeros(3, 4)
        assert weight.is_inference()
        slab = KINDS[kind]({"w": weight})
    with slab:
        slab.write("w", torch.ones(4, 3).t())
        with slab.writable(0, 4) as views:
            views[0][:4] = bytes(4)
        assert slab.tensors()["w"].flatten().tolist() == [0.0] + [1.0] * 11
        if kind == "allocated":
            slab.tensors()["w"].add_(1)


# --- adopting ---


def test_adopted_tensors_are_the_live_ones():
    weight = torch.nn.Parameter(torch.arange(6, dtype=torch.float32))
    with Slab.adopt({"w": weight}) as slab:
        assert slab.tensors()["w"] is weight
        with torch.no_grad():
            weight[0] = 42.0
        assert b"".join(slab.readable(0, 24)) == raw(weight)
        assert slab.shared_fd is None
        assert slab.kind == "adopted"


def test_views_into_one_storage():
    base = torch.arange(24, dtype=torch.int16)
    tensors = {"b": base[3:7], "a": base[12:].view(3, 4).t()}
    with Slab.adopt(tensors) as slab:
        assert b"".join(slab.readable(0, slab.size_bytes)) == raw(base[12:]) + raw(base[3:7])


def test_tied_weights_are_fine():
    weight = torch.arange(8, dtype=torch.float32)
    with Slab.adopt({"embed": weight, "head": weight, "head.again": weight.view(2, 4)}) as slab:
        assert slab.size_bytes == 3 * 32


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(4, 4)[:, :2], "holes"),
        (torch.zeros(4)[::2], "holes"),
        (torch.zeros(1).expand(5), "overlaps itself"),
        (torch.zeros(2, 3).to_sparse(), "do not say all"),
        (quantized(), "do not say all"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conjugate"),
        (torch.zeros(3, device="meta"), "meta"),
    ],
)
def test_what_cannot_be_adopted_is_named(tensor, reason):
    with pytest.raises(UsageError, match=reason) as error:
        Slab.adopt({"good": torch.zeros(2), "model.bad": tensor})
    assert "'model.bad'" in str(error.value)


def test_partial_overlap_is_refused():
    base = torch.zeros(10)
    with pytest.raises(UsageError, match="'a' and 'b' overlap"):
        Slab.adopt({"a": base[:6], "b": base[5:]})
    Slab.adopt({"a": base[:5], "b": base[5:]}).close()  # neighbours do not


def test_wrapper_tensors_are_refused():
    class Wrapper(torch.Tensor):
        def to_local(self):
            raise NotImplementedError

    with pytest.raises(UsageError, match=r"'w' is a Wrapper.*full_tensor"):
        Slab.adopt({"w": torch.zeros(3).as_subclass(Wrapper)})


# --- specs ---


def test_spec_of():
    assert spec_of("a", torch.zeros(2, 3, dtype=torch.bfloat16)) == TensorSpec("a", "bfloat16", (2, 3), 12)
    assert spec_of("a", torch.zeros(2, 3).t()) == TensorSpec("a", "float32", (3, 2), 24, (1, 3))
    assert spec_of("a", torch.zeros(())) == TensorSpec("a", "float32", (), 4)
    assert spec_of("a", torch.zeros(0, 3).t()).stride is None
    # Strides of dimensions of size 1 mean nothing: equal bytes have equal specs.
    assert spec_of("a", torch.zeros(3, 2).as_strided((2, 1, 3), (1, 77, 2))).stride == (1, 1, 2)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec("x", "float99", (2,), 8), "does not know"),
        (TensorSpec("x", "nn", (2,), 8), "does not know"),
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


def test_a_name_twice():
    with pytest.raises(UsageError, match="'x' is there twice"):
        Slab.allocate([TensorSpec("x", "int8", (1,), 1), TensorSpec("x", "int8", (2,), 2)])


# --- allocating ---


def test_allocated_tensors_are_as_specified():
    tensors = sample_tensors(seed=4)
    with allocated(tensors) as slab:
        for name, tensor in slab.tensors().items():
            assert spec_of(name, tensor) == spec_of(name, tensors[name])
            assert raw(tensor) == raw(tensors[name])
            assert tensor.data_ptr() % ALIGNMENT_BYTES == 0


def test_the_file_holds_the_tensors_where_place_says():
    """Another process knows the block's layout from the manifest alone."""
    tensors = sample_tensors(seed=5)
    with allocated(tensors) as slab:
        places, extent = place(slab.specs)
        with mmap.mmap(slab.shared_fd, extent, prot=mmap.PROT_READ) as block:
            for spec, at in zip(slab.specs, places, strict=True):
                assert at % ALIGNMENT_BYTES == 0
                assert block[at : at + spec.size_bytes] == raw(tensors[spec.name])
            whole = b"".join(block[span.place : span.place + span.size_bytes] for span in spans(slab.specs))
            assert whole == stream(tensors)


def test_tensors_of_aligned_sizes_are_one_span():
    specs = [TensorSpec(f"t{i}", "uint8", (64 * i,), 64 * i) for i in range(9)]
    assert spans(specs) == [(0, 64 * 36, 0)]
    odd = [TensorSpec("a", "uint8", (65,), 65), TensorSpec("b", "uint8", (1,), 1), TensorSpec("c", "uint8", (0,), 0)]
    assert spans(odd) == [(0, 65, 0), (65, 1, 128)]
    assert place(odd) == ((0, 128, 192), 192)
    assert place([]) == ((), 0)


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


def test_empty_slabs():
    for tensors in ({}, {"a": torch.empty(0, 3)}):
        for make in KINDS.values():
            with make(tensors) as slab:
                assert slab.size_bytes == 0
                assert slab.readable(0, 0) == [] or b"".join(slab.readable(0, 0)) == b""
                assert slab.manifest().segment_count == 0
                assert slab.manifest().check().digests == b""


# --- writing ---


def test_write_converts_strides_and_nothing_else():
    source = torch.arange(12, dtype=torch.float32).view(3, 4)
    with Slab.allocate([spec_of("a", source), spec_of("b", source.t())]) as slab:
        slab.write("a", source.t().contiguous().t())
        slab.write("b", source.t().contiguous())
        assert torch.equal(slab.tensors()["a"], source)
        assert torch.equal(slab.tensors()["b"], source.t())
        slab.write("a", torch.zeros(3, 8)[:, ::2])  # a source may have holes
        assert not slab.tensors()["a"].any()


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("w", torch.zeros(2, 3, dtype=torch.float16), r"'w' is float16\[2, 3\], the slab expects float32\[2, 3\]"),
        ("w", torch.zeros(3, 2), r"'w' is float32\[3, 2\], the slab expects float32\[2, 3\]"),
        ("v", torch.zeros(2, 3), "'v' is not in this slab"),
        ("w", torch.zeros(2, 3, device="meta"), "'w' is on the meta device"),
    ],
)
def test_write_refuses_what_differs(name, tensor, reason):
    with Slab.allocate([TensorSpec("w", "float32", (2, 3), 24)]) as slab:
        with pytest.raises(UsageError, match=reason):
            slab.write(name, tensor)
        assert slab.unwritten == ("w",)


def test_unwritten_names():
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(0)}
    with Slab.allocate(spec_of(n, t) for n, t in tensors.items()) as slab:
        assert slab.unwritten == ("a", "b", "c")
        slab.write("b", tensors["b"])
        assert slab.unwritten == ("a", "c")
        slab.mark_written(["c"])
        assert slab.unwritten == ("a",)
        slab.mark_written()
        assert slab.unwritten == ()
        slab.expect_writes()
        assert slab.unwritten == ("a", "b", "c")
    assert Slab.adopt(tensors).unwritten == ()


def test_write_into_an_adopted_parameter():
    weight = torch.nn.Parameter(torch.zeros(3))
    with Slab.adopt({"w": weight}) as slab:
        slab.write("w", torch.ones(3))
    assert weight.tolist() == [1.0, 1.0, 1.0]


# --- digests ---


def test_manifest_is_the_same_for_every_kind_and_number_of_threads(monkeypatch):
    monkeypatch.setattr(slab_module, "DIGEST_SIZE_AT_ONCE_BYTES", 3 * 997)
    tensors = sample_tensors(seed=7)
    whole = stream(tensors)
    manifests = []
    for kind, make in KINDS.items():
        with make(tensors) as slab:
            manifests += [slab.manifest(997), slab.manifest(997, threads=3)]
            assert slab.kind in (kind, "adopted")
    assert all(manifest == manifests[0] for manifest in manifests)
    manifest = manifests[0].check()
    assert manifest.segment_count > 3 * 3  # more than one of so many for each thread
    for segment in range(manifest.segment_count):
        start, stop = manifest.segment_range(segment)
        assert manifest.digest(segment) == digest_of([memoryview(whole[start:stop])])
        assert len(manifest.digest(segment)) == DIGEST_SIZE_BYTES


def test_digest_does_not_depend_on_the_cuts():
    content = bytes(range(256)) * 20
    view = memoryview(content)
    assert digest_of([view]) == digest_of([view[:1], view[1:1], view[1:4000], view[4000:]])


@settings(max_examples=50, deadline=None)
@given(position=st.integers(0, 4095), bit=st.integers(0, 7))
def test_digest_notices_one_bit(position, bit):
    content = bytearray(range(256)) * 16
    before = digest_of([memoryview(content)])
    content[position] ^= 1 << bit
    assert digest_of([memoryview(content)]) != before


def test_digest_notices_swapped_blocks_which_a_sum_does_not():
    """The negative control of position sensitivity: an XOR of 64-bit words, as others use, is blind to the swap."""

    def xor(content):
        return torch.frombuffer(bytearray(content), dtype=torch.int64).view(-1, 8).tolist()

    def fold(content):
        total = 0
        for row in xor(content):
            for word in row:
                total ^= word
        return total

    one, other = os.urandom(4096), os.urandom(4096)
    assert fold(one + other) == fold(other + one)
    assert digest_of([memoryview(one + other)]) != digest_of([memoryview(other + one)])


def test_digest_sees_the_bytes_as_they_are_now(make):
    tensors = {"a": torch.zeros(5000, dtype=torch.uint8)}
    with make(tensors) as slab:
        before = slab.manifest(1000)
        slab.tensors()["a"][2500] = 1
        after = slab.manifest(1000)
        assert [before.digest(k) == after.digest(k) for k in range(5)] == [True, True, False, True, True]
        assert before.root() != after.root()


def test_segment_size_must_be_positive(make):
    with make({"a": torch.zeros(3)}) as slab, pytest.raises(UsageError, match="segment_size_bytes"):
        slab.manifest(0)


# --- the end ---


def test_close_twice_and_nothing_after(make):
    slab = make(sample_tensors(seed=8))
    for _ in range(2):
        slab.close()
    for use in (
        slab.tensors,
        slab.manifest,
        lambda: slab.readable(0, 0),
        lambda: slab.digest(0, 1),
        lambda: slab.write("big", torch.zeros(1)),
        lambda: slab.writable(0, 1).__enter__(),
    ):
        with pytest.raises(UsageError, match="closed"):
            use()
    assert slab.shared_fd is None


def test_memory_outlives_close_for_those_who_still_have_views():
    """A thread that is sending when the slab is closed sends right bytes or none, and does not crash."""
    tensors = {"a": torch.arange(100, dtype=torch.uint8)}
    slab = allocated(tensors)
    views = slab.readable(0, 100)
    slab.close()
    assert b"".join(views) == raw(tensors["a"])


def test_no_descriptor_is_lost():
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        allocated(sample_tensors(seed=9)).close()
        Slab.allocate([TensorSpec("a", "uint8", (5,), 5)])  # dropped without close
        with pytest.raises(UsageError):
            Slab.allocate([TensorSpec("a", "uint8", (5,), 6)])
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_an_allocated_slab_keeps_the_very_table_of_a_manifest():
    with Slab.adopt(sample_tensors(seed=11)) as source:
        table = Manifest.decode(source.manifest().encoded).tensors
        assert table is source.specs
    with Slab.allocate(table) as slab, Slab.allocate(list(table)) as other, Slab.allocate(reversed(table)) as third:
        assert slab.specs is table
        assert other.specs == third.specs == table


def test_blank_like_is_no_copy():
    tensors = sample_tensors(seed=10)
    blanks = blank_like(tensors)
    assert all(spec_of(name, blanks[name]) == spec_of(name, tensors[name]) for name in tensors)
    assert set(stream(blanks)) == {0xA5}


# --- what was adopted before ---


def test_adopting_the_same_tensors_again_looks_at_nothing_twice(monkeypatch):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.int16), "empty": torch.zeros(0)}
    first = Slab.adopt(tensors)
    monkeypatch.setattr(slab_module, "spec_of", None)  # whoever looks at a tensor anew fails
    second = Slab.adopt(dict(tensors))
    assert second.specs == first.specs and second is not first
    first.close()
    tensors["b"][0] = 7
    assert b"".join(second.readable(0, second.size_bytes)) == stream(tensors)
    with pytest.raises(TypeError):  # the control: another tensor is looked at
        Slab.adopt({**tensors, "b": torch.zeros(4, dtype=torch.int16)})


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.set_(torch.ones(2, 3)),
        lambda t: t.t_(),
        lambda t: t.as_strided_((2, 3), (1, 2)),
        lambda t: t.unsqueeze_(0),
        lambda t: t.resize_(3, 2),
        lambda t: setattr(t, "data", torch.full((2, 3), 5.0)),
        lambda t: setattr(t, "data", t.data.view(torch.int32)),
    ],
    ids=["set", "transpose", "strides", "unsqueeze", "resize", "data", "dtype"],
)
def test_a_tensor_that_is_not_what_it_was_is_looked_at_anew(change):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(3)}
    before = Slab.adopt(tensors)
    change(tensors["a"])
    slab = Slab.adopt(tensors)
    assert slab.specs == tuple(spec_of(name, tensors[name]) for name in sorted(tensors))
    assert b"".join(slab.readable(0, slab.size_bytes)) == stream(tensors)
    assert slab.specs != before.specs or slab.tensors()["a"].data_ptr() == tensors["a"].data_ptr()


def test_a_lazy_conjugate_is_not_taken_for_the_tensor_it_shares_all_else_with():
    plain = torch.zeros(4, dtype=torch.complex64)
    with Slab.adopt({"a": plain}), pytest.raises(UsageError, match="lazy conjugate"):
        Slab.adopt({"a": plain.conj()})


@pytest.mark.parametrize("bad", [torch.ones(4).to_sparse(), torch.ones(4, device="meta"), b"extra state", None])
def test_what_cannot_be_adopted_is_said_though_its_name_is_remembered(bad):
    tensors = {"a": torch.ones(4)}
    with Slab.adopt(tensors), pytest.raises(UsageError, match="'a'"):
        Slab.adopt({"a": bad})


def test_tensors_and_slabs_that_last_as_long_as_the_interpreter_end_without_a_word():
    script = """
import torch
from tensorhub_plugins.core.memory import slab  # goes first, and empties its module
tensors = {f"t{k}": torch.ones(2) for k in range(3)}
adopted, allocated = slab.Slab.adopt(tensors), slab.Slab.allocate(slab.Slab.adopt(tensors).specs)
print(adopted.size_bytes)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert (ran.stdout, ran.stderr) == ("24\n", "")


@pytest.mark.parametrize("kind", ["adopted", "allocated"])
def test_addresses_of_a_range_are_those_of_its_bytes(kind):
    assert staged(sample_tensors(1)).addresses(0, 1) is None
    with KINDS[kind](sample_tensors(1)) as slab:
        whole = b"".join(slab.readable(0, slab.size_bytes))
        for start, stop in [(0, len(whole)), (0, 1), (5, 5), (3, len(whole) - 2), (len(whole) - 1, len(whole))]:
            places = slab.addresses(start, stop).tolist()
            assert b"".join(ctypes.string_at(address, size) for address, size in places) == whole[start:stop]
        with pytest.raises(UsageError, match="outside"):
            slab.addresses(1, len(whole) + 1)


@pytest.mark.parametrize("how", ["dies", "is given other memory"])
def test_what_is_remembered_of_tensors_keeps_no_memory(how):
    tensors = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    storage = StorageWeakRef(tensors["a"].untyped_storage())
    slab = Slab.adopt(tensors)
    if how == "dies":
        del tensors["a"]
    else:
        tensors["a"].data = torch.ones(1000)
    assert not storage.expired() and b"".join(slab.readable(0, 4000)) == bytes(4000)  # a slab keeps what it serves
    slab.close()
    del slab
    assert storage.expired()
