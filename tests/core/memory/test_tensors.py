"""What a tensor is in memory: described, compared, flattened, and told from others of the same memory."""

import pytest
import torch
from slabs import raw, stream
from transport_suite import blank_like, sample_tensors

from tensorhub_plugins.core.manifest import TensorSpec
from tensorhub_plugins.core.memory.tensors import flat_bytes, in_memory_order, same_bytes, spec_of, without_aliases

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_spec_of():
    assert spec_of("a", torch.zeros(2, 3, dtype=torch.bfloat16)) == TensorSpec("a", "bfloat16", (2, 3), 12)
    assert spec_of("a", torch.zeros(2, 3).t()) == TensorSpec("a", "float32", (3, 2), 24, (1, 3))
    assert spec_of("a", torch.zeros(())) == TensorSpec("a", "float32", (), 4)
    assert spec_of("a", torch.zeros(0, 3).t()).stride is None
    # Strides of dimensions of size 1 mean nothing: equal bytes have equal specs.
    assert spec_of("a", torch.zeros(3, 2).as_strided((2, 1, 3), (1, 77, 2))).stride == (1, 1, 2)


def test_blank_like_is_no_copy():
    tensors = sample_tensors(seed=10)
    blanks = blank_like(tensors)
    assert all(spec_of(name, blanks[name]) == spec_of(name, tensors[name]) for name in tensors)
    assert set(stream(blanks)) == {0xA5}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),  # equal numbers, other bytes
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        (torch.zeros(2), torch.zeros(1, 2), False),
        (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t(), False),
        (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t().contiguous().t(), True),  # other strides
        (torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t(), True),
        (torch.zeros(4, 4)[:, :2], torch.zeros(4, 2), True),  # one has holes
        (torch.zeros(0, 3), torch.zeros(0, 3), True),
    ],
)
def test_tensors_are_compared_byte_for_byte_in_the_order_of_their_elements(one, other, same):
    assert same_bytes(one, other) is same and same_bytes(other, one) is same


def test_every_dtype_is_flat_and_equal_to_itself_and_to_no_other_of_its_shape():
    for tensor in sample_tensors(seed=12).values():
        flat = flat_bytes(tensor)
        assert bytes(flat.numpy()) == raw(tensor) and same_bytes(tensor, tensor)
        if tensor.numel():
            other = blank_like({"x": tensor})["x"]
            assert same_bytes(tensor, other) == (raw(tensor) == raw(other))


def test_writing_flat_bytes_writes_the_tensor():
    tensor = torch.zeros(2, 3).t()
    with torch.inference_mode():
        flat = flat_bytes(tensor)
    flat[3] = 0x80
    assert raw(tensor) == b"\0\0\0\x80" + bytes(20)


def test_memory_order_is_a_contiguous_view_of_the_same_memory():
    base = torch.arange(24.0).view(2, 3, 4)
    for tensor in (base, base.permute(2, 0, 1), base[:, :2]):
        view = in_memory_order(tensor)
        assert view.is_contiguous() and view.data_ptr() == tensor.data_ptr()
    assert in_memory_order(base.permute(2, 0, 1)).shape == base.shape
    assert in_memory_order(base[:, :2]).shape == (20,)  # with the hole in it


def test_memory_that_another_contains_is_dropped():
    base = torch.zeros(10)
    assert list(without_aliases({"b": base, "a": base[:5], "c": base, "d": torch.zeros(3)})) == ["b", "d"]
    assert list(without_aliases({"a": base[:5], "b": base[5:]})) == ["a", "b"]
