"""Deltas give back every byte, whatever the elements; both kernels make the same bytes; and nonsense writes nowhere."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_plugins.core.deltas import codec, native
from tensorhub_plugins.core.deltas.codec import NUMPY, Span, apply, encode, spans_of

GUARD = 64  # bytes beside what is written to


@functools.cache
def native_kernel() -> codec.Kernel:
    try:
        return native.compiled()
    except OSError as error:
        pytest.skip(str(error))


@st.composite
def segments(draw: st.DrawFn) -> tuple[codec.Bytes, codec.Bytes, list[Span]]:
    """Two versions of a segment whose tensors have elements of several sizes, and its spans."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    olds, news, pieces, at = [], [], [], -draw(st.integers(0, 7))
    for _ in range(draw(st.integers(1, 4))):
        size, count = draw(st.sampled_from([1, 2, 4, 8, 16, 3])), draw(st.integers(0, 1500))
        density = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 0.9, 1.0]))
        width = next(each for each in codec.SIZES if size % each == 0)
        dtype = codec.UNSIGNED[width]
        old = random.integers(0, 1 << 8 * width, count * size // width, dtype=dtype, endpoint=False)
        new = old.copy()
        changed = random.random(new.size) < density
        if draw(st.booleans()):
            new[changed] += random.choice(
                np.array([1, -1, 2, 300]).astype(np.int64).view(np.uint64), changed.sum()
            ).astype(dtype)
        else:
            new[changed] = random.integers(0, 1 << 8 * width, changed.sum(), dtype=dtype, endpoint=False)
        olds.append(old.view(np.uint8))
        news.append(new.view(np.uint8))
        pieces.append((at, at + old.nbytes, size))
        at += old.nbytes
    cut = -pieces[0][0]  # the segment begins within its first tensor, and perhaps within an element
    old, new = (np.concatenate(each)[cut:] for each in (olds, news))
    return old.copy(), new.copy(), spans_of(pieces, old.size)


@given(segments())
@settings(max_examples=80, deadline=None)
def test_every_byte_comes_back_from_both_kernels_alike(case):
    old, new, spans = case
    assert [span.start for span in spans] == [0, *(span.stop for span in spans)][: len(spans)]
    assert (spans[-1].stop if spans else 0) == old.size
    made = encode(old, new, spans, NUMPY)
    assert made == encode(old, new, spans, native_kernel())
    if made is None:
        return
    assert len(made) <= codec.WORTH * old.size
    for kernel in (NUMPY, native_kernel()):
        target = old.copy()
        apply(target, made, spans, kernel)
        assert np.array_equal(target, new)


@pytest.mark.parametrize("writer", ["zlib", "isal"])
def test_what_one_library_has_deflated_the_other_inflates(monkeypatch, writer):
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    random = np.random.default_rng(1)
    old = random.integers(0, 1 << 16, 1 << 19, dtype=np.uint16)
    new = old + (random.random(old.size) < 0.1) * random.integers(1, 5, old.size, dtype=np.uint16)
    assert NUMPY.difference(old, new, bitmap=False).positions.size >= codec.FAST_FROM
    spans, made = [Span(0, old.nbytes, 2)], {}
    for name, library in {"zlib": zlib, "isal": isal_zlib}.items():
        monkeypatch.setattr(codec, "fast_zlib", library)
        made[name] = encode(old.view(np.uint8), new.view(np.uint8), spans, NUMPY)
    monkeypatch.setattr(codec, "fast_zlib", isal_zlib if writer == "zlib" else zlib)
    assert made["zlib"] != made["isal"] and abs(len(made["isal"]) / len(made["zlib"]) - 1) < 0.05
    target = old.copy()
    apply(target.view(np.uint8), made[writer], spans, NUMPY)
    assert np.array_equal(target, new)
    no_block = made[writer][:4] + b"\x07" + made[writer][5:]  # after mode and size, the first block has no known type
    with pytest.raises(ValueError, match="block"):
        apply(old.copy().view(np.uint8), no_block, spans, NUMPY)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.5, 1.0])
def test_the_kernels_agree_on_whole_segments(size, density):
    random = np.random.default_rng(size)
    dtype = codec.UNSIGNED[size]
    old = random.integers(0, 255, 100_003, dtype=np.uint64).astype(dtype)
    new = old + (random.random(old.size) < density).astype(dtype)
    for bitmap in (False, True):
        mine = NUMPY.difference(old, new, bitmap=bitmap)
        theirs = native_kernel().difference(old, new, bitmap=bitmap)
        assert all(np.array_equal(one, other) for one, other in zip(mine, theirs, strict=True))
        for kernel in (NUMPY, native_kernel()):
            target = old.copy()
            kernel.apply(target, mine, bitmap=bitmap)
            assert np.array_equal(target, new)


def test_a_step_of_one_in_the_last_place_takes_about_a_byte_and_a_half():
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, 1 << 21, dtype=np.uint16)
    new = old + np.where(random.random(old.size) < 0.01, 1, 0).astype(np.uint16)
    made = encode(old.view(np.uint8), new.view(np.uint8), [Span(0, old.nbytes, 2)], NUMPY)
    assert made is not None and old.nbytes / len(made) > 150


def test_what_is_not_worth_it_is_not_made():
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 256, 1 << 20, dtype=np.uint8) for _ in range(2))
    assert encode(old, new, [Span(0, old.size, 2)], NUMPY) is None


def test_thousands_of_tiny_tensors_of_many_kinds_are_bytes():
    pieces = [(4 * k, 4 * k + 4, 4 if k % 2 else 1) for k in range(1000)]
    assert spans_of(pieces, 4000) == [Span(0, 4000, 1)]
    assert spans_of(pieces[:3], 12) == [Span(0, 4, 1), Span(4, 8, 4), Span(8, 12, 1)]  # the control


@given(st.binary(max_size=300), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=200, deadline=None)
def test_nonsense_is_refused_or_stays_within(delta, size):
    spans = [Span(0, 5 * size, size), Span(5 * size, 64 + 5 * size, 2)]
    for kernel in (NUMPY, native_kernel()):
        memory = np.zeros(GUARD + 64 + 5 * size + GUARD, np.uint8)
        with contextlib.suppress(ValueError):
            apply(memory[GUARD:-GUARD], delta, spans, kernel)
        assert not memory[:GUARD].any() and not memory[-GUARD:].any()


@given(segments(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_delta_is_refused_or_gives_other_bytes_within(case, data):
    old, new, spans = case
    made = encode(old, new, spans, NUMPY)
    if not made:
        return
    damaged = bytearray(made)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(made) - 1))] ^= data.draw(st.integers(1, 255))
    del damaged[data.draw(st.integers(1, len(made))) :]
    results = []
    for kernel in (NUMPY, native_kernel()):
        memory = np.concatenate([np.zeros(GUARD, np.uint8), old, np.zeros(GUARD, np.uint8)])
        try:
            apply(memory[GUARD : GUARD + old.size], damaged, spans, kernel)
            results.append(memory.tobytes())
        except ValueError:
            results.append(b"")
        assert not memory[:GUARD].any() and not memory[-GUARD:].any()
    assert results[0] == results[1]  # both take it, or both refuse it


def test_a_bomb_is_not_inflated():
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = deflate.compress(bytes(1 << 28)) + deflate.flush()
    size = len(bomb) * 2 + 1
    delta = bytes([codec.GAPS]) + codec._varint(size) + bomb
    with pytest.raises(ValueError, match="too long"):
        apply(np.zeros(1 << 10, np.uint8), delta, [Span(0, 1 << 10, 2)], NUMPY)


def test_without_a_compiler_numpy_does_the_work(monkeypatch, caplog):
    monkeypatch.setattr(native, "_kernel", NUMPY)
    without = functools.partial(native.compiled, ("no-such-compiler",))
    with pytest.raises(FileNotFoundError):
        without()
    native._compile_quietly(without)
    assert native.kernel() is NUMPY

    def broken() -> codec.Kernel:
        raise subprocess.CalledProcessError(1, "cc", stderr="Cannot create temporary file in /tmp/")

    with caplog.at_level("INFO"):
        native._compile_quietly(broken)
    assert "Cannot create temporary file in /tmp/" in caplog.text and native.kernel() is NUMPY
    monkeypatch.setattr(native, "_kernel", NUMPY)
    native._compile_quietly(native_kernel)
    assert native.kernel() is native_kernel()


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "control"])
def test_a_fork_begins_anew(monkeypatch, forked):
    """It has none of the threads of its parent, which may have been at work, and would go on with numpy for ever."""
    begun = threading.Event()
    monkeypatch.setattr(native, "_kernel", NUMPY)
    monkeypatch.setattr(native, "_compile_quietly", begun.set)
    monkeypatch.setattr(native, "_begun", {os.getppid() if forked else os.getpid()})
    native.begin()
    native.begin()
    for thread in threading.enumerate():
        if thread.name == "tensorhub-compile":
            thread.join()
    assert begun.is_set() == forked


@pytest.mark.parametrize("kernel_of", [lambda: NUMPY, native_kernel], ids=["numpy", "native"])
def test_they_leave_nothing_for_a_garbage_collection(kernel_of):
    kernel, spans = kernel_of(), [Span(0, 2000, 2), Span(2000, 3000, 1)]
    old = np.arange(3000, dtype=np.uint8)
    new = old.copy()
    new[::100] += 1

    def both() -> None:
        delta = encode(old, new, spans, kernel)
        assert delta is not None
        apply(old.copy(), delta, spans, kernel)

    both()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(100):
            both()
        assert len(gc.get_objects()) - before < 100
    finally:
        gc.enable()
