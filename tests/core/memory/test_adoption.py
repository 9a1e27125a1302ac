"""What is remembered of live tensors: never more than is so, and none of their memory."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from slabs import stream
from torch.multiprocessing.reductions import StorageWeakRef

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import TensorTable
from tensorhub_plugins.core.memory import adoption
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.memory.tied import LiveTensors


def test_slabs_of_the_same_tensors_share_what_stands_for_their_memory():
    """By it others keep what they know of that memory, for as long as it lies where it lay."""
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2)}
    first, second = Slab.adopt(tensors), Slab.adopt(dict(tensors))
    assert first.runs is second.runs
    assert Slab.adopt({"a": tensors["a"]}).runs is not first.runs
    tensors["b"].data = torch.ones(2)
    assert Slab.adopt(tensors).runs is not first.runs


class Made(Mapping[str, torch.Tensor]):
    """A mapping whose tensors are made when they are asked for: anew, or as views of what is there."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self.make, self.asked = make, list[str]()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return self.make(int(name))

    def __iter__(self) -> Iterator[str]:
        return iter("0123")

    def __len__(self) -> int:
        return 4


def test_tensors_that_are_made_when_they_are_asked_for_are_asked_for_once_and_kept():
    made = Made(lambda number: torch.full((300_000,), float(number)))
    slab = Slab.adopt(made)
    assert made.asked == list("0123")
    others = [torch.full((300_000,), -1.0) for _ in range(8)]  # would take the memory of tensors that were let go
    assert b"".join(slab.readable(0, slab.size_bytes)) == stream({name: made[name] for name in made})
    assert len(others) == 8


def test_nothing_is_read_into_tensors_that_are_made_when_they_are_asked_for():
    with pytest.raises(UsageError, match=r"tensor '0' is another one each time that this Made is asked .* pass a dict"):
        LiveTensors(Made(lambda number: torch.full((10,), float(number))))
    memory = torch.zeros(4, 10)
    assert LiveTensors(Made(lambda number: memory[number])).whole.size_bytes == 160  # views of what stays are fine


def test_adopting_the_same_tensors_again_looks_at_nothing_twice(monkeypatch):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.int16), "empty": torch.zeros(0)}
    first = Slab.adopt(tensors)
    monkeypatch.setattr(adoption, "spec_of", None)  # whoever looks at a tensor anew fails
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
    assert slab.specs == TensorTable.of(spec_of(name, tensors[name]) for name in tensors)
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


@pytest.mark.parametrize("how", ["dies", "is given other memory", "is one of too many"])
def test_what_stands_for_the_memory_goes_with_it_and_not_with_a_collection(how):
    tensors = {"a": torch.zeros(10), "b": torch.zeros(10)}
    runs = weakref.ref(Slab.adopt(tensors).runs)
    others = [{"a": torch.zeros(1)} for _ in range(adoption.ADOPTIONS_MAX)]
    gc.disable()
    try:
        assert runs() is not None
        if how == "dies":
            del tensors["a"]
        elif how == "is given other memory":
            tensors["a"].data = torch.ones(10)
            Slab.adopt(tensors)
        else:
            for other in others:
                Slab.adopt(other)
        assert runs() is None
    finally:
        gc.enable()
