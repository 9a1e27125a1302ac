"""One tensor in memory: its description, its bytes, its strides, and which tensors share them.

All functions take tensors of any device. The bytes of a dense tensor (any permutation of contiguous) are those of its
storage, in the storage's order: nothing is copied to make a transposed weight contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias, cast

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tensorhub_plugins.core.deadline import NEVER, until
from tensorhub_plugins.core.device.devices import of, on_host
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import TensorSpec
from tensorhub_plugins.core.types import is_text

COMPARE_SIZE_BYTES = 4 << 20  # at once: data on another device is copied to the host for it

Extent: TypeAlias = tuple[str, int, int, str]  # device, address, size in bytes, name of the tensor

# --- what a tensor is ---


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a dense tensor of any device. Raise UsageError that names it for one with holes, overlaps or no bytes of
    its own (sparse, quantized, a wrapper, a lazy conjugate)."""
    check_plain(name, tensor)
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(f"tensor {name!r} is a lazy conjugate or negation: pass tensor.resolve_conj().resolve_neg()")
    shape = tuple(tensor.shape)
    stride = stride_of(tensor)
    if stride is not None and not is_dense(shape, stride):
        raise UsageError(
            f"tensor {name!r} of shape {list(shape)} and strides {list(tensor.stride())} has holes or overlaps itself: "
            "pass a contiguous copy"
        )
    size_bytes = tensor.numel() * tensor.element_size()
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), shape, size_bytes, stride)


def contiguous_spec(name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorSpec:
    """Describe a contiguous tensor that need not exist yet. shape: in elements."""
    shape = tuple(shape)
    return TensorSpec(name, str(dtype).removeprefix("torch."), shape, math.prod(shape) * dtype.itemsize)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the dtype, which torch has here: the spec was made in this process."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def copied_spec(name: str, tensor: torch.Tensor, *, is_part: bool = False) -> TensorSpec:
    """Describe a copy of this tensor: with its strides where it is a permutation of a contiguous one, as a transposed
    or channels_last weight is, so that it can be read into its twin; else contiguous, as every part is."""
    spec, stride = contiguous_spec(name, tensor.dtype, tensor.shape), stride_of(tensor)
    if is_part or stride is None or not spec.size_bytes or not is_dense(spec.shape, stride):
        return spec
    return msgspec.structs.replace(spec, stride=stride)


def check_tensors(tensors: object, deadline: float = NEVER) -> list[str]:
    """Return the names, sorted. Raise UsageError that says what is wrong unless this maps text to tensors."""
    mapping = check_mapping(tensors)
    for name, tensor in until(deadline, zip(mapping.keys(), mapping.values(), strict=True)):
        check_tensor(name, tensor)
    return sorted(mapping.keys())


def check_mapping(tensors: object) -> Mapping[str, torch.Tensor]:
    """Return this mapping, or raise UsageError."""
    if not all(hasattr(tensors, method) for method in ("keys", "values", "__getitem__")):
        what = "pass its state_dict()" if hasattr(tensors, "state_dict") else "pass a mapping of name to tensor"
        raise UsageError(f"the tensors are a {type(tensors).__name__}: {what}")
    return cast("Mapping[str, torch.Tensor]", tensors)


def held(tensors: Mapping[str, torch.Tensor], deadline: float = NEVER) -> dict[str, torch.Tensor]:
    """Return these in a dict of its own: each is asked for once, as a mapping may make others each time. Raise
    UsageError as `check_tensors` does."""
    check_mapping(tensors)
    names = until(deadline, tensors.keys())
    return dict(tensors) if type(tensors) is dict else {name: tensors[name] for name in names}


def check_kept(tensors: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor], deadline: float = NEVER) -> None:
    """Raise UsageError unless the mapping has these very tensors, or views of their memory: one that makes them when
    asked would never show what is read into them."""
    for name, tensor in until(deadline, mine.items()):
        if tensors[name].data_ptr() != tensor.data_ptr():
            raise UsageError(
                f"tensor {name!r} is another one each time that this {type(tensors).__name__} is asked for it, so that "
                "nothing can be read into it: pass a dict of the tensors"
            )


def check_tensor(name: object, tensor: object) -> None:
    """Raise UsageError that says what is wrong with the name, or with the object that it names."""
    if type(name) is not str:
        raise UsageError(f"the name {name!r:.80} of a tensor is a {type(name).__name__}: pass a plain str")
    if not is_text(name):
        raise UsageError(
            f"the name {name!r:.80} of a tensor holds half a surrogate pair, which no message can: rename it"
        )
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name!r} is a {type(tensor).__name__}, not a tensor: leave it out")
    if tensor.is_nested:
        raise UsageError(f"tensor {name!r} is nested, several of different shapes: pass each under a name of its own")
    if tensor.layout is not torch.strided:
        raise UsageError(f"tensor {name!r} is {tensor.layout} {tensor.dtype}: its bytes do not say all that it holds")
    if not has_memory(tensor):
        raise UsageError(
            f"tensor {name!r} is a {type(tensor).__name__} without memory of its own (it stands for one while "
            "something is traced, was not initialized, or its memory was freed, as FSDP does): pass a real one"
        )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether its bytes are in memory, unlike those of a FakeTensor, of vmap's stand-in for a tensor, of a lazy
    module's parameter, or of a freed storage. Wrappers are rejected elsewhere, where they are not supported."""
    if isinstance(tensor, FakeTensor):
        return False
    if hasattr(tensor, "to_local") or hasattr(tensor, "__tensor_flatten__"):
        return True
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except (RuntimeError, ValueError):
        return False
    return storage.nbytes() >= tensor.storage_offset() * tensor.element_size() + span_of(tensor) or not tensor.numel()


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError as `check_tensor` does, and for a tensor whose storage does not hold all of its contents."""
    check_tensor(name, tensor)
    if hasattr(tensor, "to_local") or hasattr(tensor, "__tensor_flatten__"):
        raise UsageError(
            f"tensor {name!r} is a {type(tensor).__name__}, a wrapper around other tensors: pass those "
            "(a DTensor's full_tensor() or to_local())"
        )
    if tensor.is_quantized or str(tensor.dtype).startswith("torch.q"):  # the latter: a view of other bytes
        raise UsageError(f"tensor {name!r} is {tensor.layout} {tensor.dtype}: its bytes do not say all that it holds")


# --- bytes and strides ---


@torch.inference_mode(False)  # engines call from inference mode, whose tensors cannot be written outside of it
def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the storage of a dense tensor as uint8[size_bytes]: writing it writes the tensor. Any dtype."""
    size_bytes = tensor.numel() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (size_bytes,), (1,))


@torch.inference_mode(False)
def shaped_as(like: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """View this memory, uint8, as a tensor with the dtype, shape and strides of `like`."""
    empty = torch.empty(0, dtype=like.dtype, device=flat.device)
    start = int(flat.storage_offset()) // like.element_size()
    return empty.set_(flat.untyped_storage(), start, like.shape, like.stride())


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether dtype, shape and every byte are equal (NaN equals itself). The two may be on different devices."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    stride = stride_of(one)
    if stride != stride_of(other) or (stride is not None and not is_dense(one.shape, stride)):
        one, other = one.contiguous(), other.contiguous()
    mine, theirs = flat_bytes(one), flat_bytes(other)
    if of(mine) is of(theirs) is None:
        if not any(n % 8 for t in (mine, theirs) for n in (t.numel(), t.storage_offset(), t.data_ptr())):
            mine, theirs = mine.view(torch.int64), theirs.view(torch.int64)  # four times as fast
        return torch.equal(mine, theirs)
    for start in range(0, mine.numel(), COMPARE_SIZE_BYTES):
        part = slice(start, start + COMPARE_SIZE_BYTES)
        if not torch.equal(on_host(mine[part]), on_host(theirs[part])):
            return False
    return True


def stride_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return None when contiguous, else the strides in elements, with 1 for dimensions of size 1."""
    if tensor.is_contiguous():
        return None
    return tuple(s if n != 1 else 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def span_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes from its first element to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether such a tensor is a permutation of a contiguous one: without holes, not overlapping itself."""
    expected = 1
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view of all the memory between the tensor's first and last element: its dimensions permuted,
    or, where there are holes, one flat run that includes them."""
    order = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
    permuted = tensor.permute(order)
    if permuted.is_contiguous():
        return permuted
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (span,), (1,))


# --- tensors that share memory ---


def ties_of(extents: list[Extent]) -> dict[str, str]:
    """Return each name whose memory is exactly another's, with the first name of that memory. Raise UsageError for a
    partial overlap: one tensor's update would tear the other's."""
    ties: dict[str, str] = {}
    for (device, address, size, name), (other_device, other, other_size, other_name) in pairwise(sorted(extents)):
        if device == other_device and other < address + size:
            if (address, size) != (other, other_size):
                raise UsageError(
                    f"tensors {name!r} and {other_name!r} overlap in part: adopt that memory under one name"
                )
            ties[other_name] = ties.get(name, name)
    return ties


def without_aliases(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors except those whose memory another one contains; of equals, the first stays. Sorted by name."""
    kept: list[str] = []
    end_by_storage: dict[tuple[torch.device, int], int] = {}

    def extent(name: str) -> tuple[int, int]:
        start = found[name].data_ptr()
        return start, start + found[name].numel() * found[name].element_size()

    order = {name: position for position, name in enumerate(found)}
    for name in sorted(found, key=lambda n: (extent(n)[0], -extent(n)[1], order[n])):
        start, end = extent(name)
        storage = (found[name].device, found[name].untyped_storage().data_ptr())
        if end > end_by_storage.get(storage, start):
            kept.append(name)
            end_by_storage[storage] = end
    return {name: found[name] for name in sorted(kept)}
