"""Copies between views cut differently, and digests: of the bytes as they are now, wherever they are cut."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slabs import KINDS, stream
from transport_suite import sample_tensors

from tensorhub_plugins.core.digests import DIGEST_SIZE_BYTES, digest_of
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.memory.copying import copy_views, digests_of_segments

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def test_copy_views_of_different_cuts():
    source = [memoryview(b"ab"), memoryview(b""), memoryview(b"cdefg"), memoryview(b"hij")]
    target = bytearray(10)
    view = memoryview(target)
    copy_views(source, [view[:3], view[3:3], view[3:9], view[9:]])
    assert target == b"abcdefghij"


def test_manifest_is_the_same_for_every_kind_and_number_of_threads():
    tensors = sample_tensors(seed=7)
    whole = stream(tensors)
    manifests = []
    for kind, make in KINDS.items():
        with make(tensors) as slab:
            manifests += [slab.manifest(997), slab.manifest(997, threads=3)]
            assert slab.kind in (kind, "adopted")
            several = digests_of_segments(slab.digest, slab.size_bytes, 997, threads=3, size_at_once_bytes=3 * 997)
            assert several == manifests[0].digests
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
