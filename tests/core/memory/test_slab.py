"""Slabs: every tensor becomes the stream it should, and back, in place; what cannot work is refused by name."""

import ctypes
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slabs import KINDS, allocated, raw, stream, through_host
from transport_suite import sample_tensors

from tensorhub_plugins.core.digests import digest_of
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import TensorSpec
from tensorhub_plugins.core.memory import runs
from tensorhub_plugins.core.memory.copying import copy_views
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


# --- what is left of it ---


@pytest.mark.parametrize("kept", [4, 2, 0], ids=["control", "some", "none"])
def test_what_was_cut_off_a_mapped_file_is_damaged(tmp_path, kept):
    """Who reads it is ended by SIGBUS: a child looks."""
    path, segment = tmp_path / "file", 1 << 16
    path.write_bytes(bytes(4 * segment))
    with Slab.adopt({"w": torch.from_file(str(path), size=4 * segment, dtype=torch.uint8)}) as slab:
        manifest = slab.manifest(segment)
        os.truncate(path, kept * segment)
        if (child := os.fork()) == 0:
            found = slab.damaged(manifest), slab.damaged(manifest, [1, 3])
            os._exit(found == ([k for k in range(4) if k >= kept], [k for k in (1, 3) if k >= kept]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize("step", [1, 2, 128], ids=["side by side", "with gaps", "apart"])
def test_each_page_is_looked_at_once_however_many_tensors_it_has(monkeypatch, step):
    """Each call to the system may lose the GIL: with one for each tensor 150,000 took seconds."""
    block = torch.zeros(64 * 4096 * 4, dtype=torch.uint8)
    starts, asked = range(0, 64 * 4096, 64 * step), list[tuple[int, int]]()
    with Slab.adopt({f"w{at}": block[4 * at : 4 * at + 48] for at in starts}) as slab:
        touched = {byte // 4096 for first, size in slab.addresses().tolist() for byte in (first, first + size - 1)}
        slab.runs.is_of_files = True  # else none is looked at
        monkeypatch.setattr(
            runs, "_libc", SimpleNamespace(madvise=lambda first, size, _: asked.append((first.value, size.value)) or 0)
        )
        assert slab.damaged(slab.manifest(1 << 20), [0]) == []
    pages = [page for first, size in asked for page in range(first // 4096, (first + size) // 4096)]
    assert set(pages) == touched and len(pages) == len(touched)
    assert len(asked) == (len(starts) if step == 128 else 1)


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


def test_device_memory_is_untouched_when_receiving_fails():
    tensors = {"a": torch.zeros(10, dtype=torch.uint8)}
    slab = through_host(tensors)
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
        (torch.zeros(3, dtype=torch.uint8).view(torch.qint8), "do not say all"),
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


# --- allocating ---


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


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint3, torch.bool, torch.float8_e4m3fn, torch.int8])
def test_elements_of_one_byte_are_written_with_any_strides(dtype):
    """Torch copies some of them only where the strides are equal."""
    raw = torch.arange(16, dtype=torch.uint8).view(4, 4)
    with Slab.allocate([TensorSpec("w", str(dtype).removeprefix("torch."), (4, 2), 8)]) as slab:
        slab.write("w", (raw > 5 if dtype is torch.bool else raw.view(dtype))[:, ::2])
        written = torch.frombuffer(bytearray().join(slab.readable(0, 8)), dtype=torch.uint8).view(4, 2)
        assert torch.equal(written, (raw > 5)[:, ::2].to(torch.uint8) if dtype is torch.bool else raw[:, ::2])
    with Slab.allocate([TensorSpec("w", "int8", (4,), 4)]) as slab:  # a lazy negation is no byte
        slab.write("w", torch._neg_view(torch.arange(8, dtype=torch.int8))[::2])
        assert slab.tensors()["w"].tolist() == [0, -2, -4, -6]


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
    assert through_host(sample_tensors(1)).addresses(0, 1) is None
    with KINDS[kind](sample_tensors(1)) as slab:
        whole = b"".join(slab.readable(0, slab.size_bytes))
        for start, stop in [(0, len(whole)), (0, 1), (5, 5), (3, len(whole) - 2), (len(whole) - 1, len(whole))]:
            places = slab.addresses(start, stop).tolist()
            assert b"".join(ctypes.string_at(address, size) for address, size in places) == whole[start:stop]
        with pytest.raises(UsageError, match="outside"):
            slab.addresses(1, len(whole) + 1)
