"""The seam to pyverbs, as far as it can be tested without it."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_plugins.core.transports.rdma import verbs as _verbs
from tensorhub_plugins.core.transports.rdma.rails import Port
from tensorhub_plugins.core.transports.rdma.verbs import Ring, VerbsError, status_name, why_not

MODULES = {
    "device": ("Context",),
    "pd": ("PD",),
    "mr": ("MR", "DmaBufMR"),
    "cq": ("CQ", "CompChannel"),
    "qp": ("QP", "QPCap", "QPInitAttr", "QPAttr"),
    "addr": ("GID", "GlobalRoute", "AHAttr"),
    "wr": ("SGE", "SendWR"),
    "pyverbs_error": ("PyverbsError",),
}


@pytest.fixture
def device(tmp_path: Path) -> Path:
    (tmp_path / "mlx5_0").mkdir()
    return tmp_path


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _verbs._pyverbs.cache_clear()
    yield
    _verbs._pyverbs.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, numbers: str, without: str = "") -> None:
    """A pyverbs with the names that are used, its numbers in the module of this name."""

    def module(name: str) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    package = module("pyverbs")
    package.__path__ = []
    for name, attributes in MODULES.items():
        made = module(f"pyverbs.{name}")
        for attribute in attributes:
            if attribute != without:
                setattr(made, attribute, object())
    module(f"pyverbs.{numbers}").IBV_WC_SUCCESS = 0  # type: ignore[attr-defined]


def test_without_a_device_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_verbs, "_pyverbs", lambda: pytest.fail("pyverbs was looked for"))
    for sysfs in (tmp_path, tmp_path / "missing"):
        reason = why_not(sysfs)
        assert reason is not None and "no RDMA device" in reason


def test_pyverbs_missing(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = why_not(device)
    assert reason is not None and "python3-pyverbs" in reason


@pytest.mark.parametrize("numbers", ["enums", "libibverbs_enums"])
def test_both_names_of_the_numbers(device: Path, monkeypatch: pytest.MonkeyPatch, numbers: str) -> None:
    install(monkeypatch, numbers)
    assert why_not(device) is None
    assert _verbs._pyverbs().numbers.__name__ == f"pyverbs.{numbers}"


def test_pyverbs_that_does_not_fit(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "enums", without="SendWR")
    reason = why_not(device)
    assert reason is not None and "does not fit" in reason and "SendWR" in reason


def test_pyverbs_without_numbers(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "somewhere_else")
    reason = why_not(device)
    assert reason is not None and "libibverbs_enums" in reason


def test_the_names_of_errors_are_not_those_of_opcodes() -> None:
    numbers = types.SimpleNamespace(IBV_WC_SEND=0, IBV_WC_RDMA_READ=2, IBV_WC_LOC_QP_OP_ERR=2, IBV_WC_RETRY_EXC_ERR=12)
    assert status_name(numbers, 2) == "LOC_QP_OP_ERR"
    assert status_name(numbers, 12) == "RETRY_EXC_ERR"
    assert status_name(numbers, 99) == "status 99"


def test_foreign_errors_are_translated_and_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class PyverbsRDMAError(Exception):
        error_code = 12

    monkeypatch.setattr(_verbs.resource, "getrlimit", lambda _: (8192 << 10, 8192 << 10))
    expected = r"cannot register 5 bytes: no\. *;.* 8192 KiB.*ulimit -l"
    with pytest.raises(VerbsError, match=expected), _verbs._translated("register 5 bytes"):
        raise PyverbsRDMAError("no. ")


# --- memory of a device ---


class FakeRegion:
    lkey, rkey = 1, 2

    def __init__(self, *arguments: object, **named: object) -> None:
        self.named = named


def nic(*, peer_memory: bool) -> _verbs.Nic:
    """One that registers addresses of the host, and those of a device only with peer memory."""

    def region(*arguments: object, **named: object) -> FakeRegion:
        if not peer_memory:
            raise ValueError("Bad address")
        return FakeRegion(*arguments, **named)

    numbers = types.SimpleNamespace(IBV_ACCESS_LOCAL_WRITE=1, IBV_ACCESS_REMOTE_READ=4)
    made = object.__new__(_verbs.Nic)
    made._v = types.SimpleNamespace(MR=region, DmaBufMR=FakeRegion, numbers=numbers)
    made._guard, made._closing = threading.Lock(), False
    made.domain, made.port = object(), Port("mlx5_0", 1, "Ethernet", 3, "::ffff:10.0.0.1")
    return made


def test_memory_of_a_device_is_registered_as_it_is_where_peer_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_verbs, "export_dma_buf", lambda *_: pytest.fail("a dma-buf was asked for"))
    memory = nic(peer_memory=True).register(0x7000_1234, 100, "cuda")
    assert (memory.address, memory.how) == (0x7000_1234, "by peer memory")


def test_else_as_a_dma_buf_and_named_by_its_place_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(_verbs, "export_dma_buf", lambda address, _: (exported, address % 4096))
    memory = nic(peer_memory=False).register(0x7000_1234, 100, "cuda")
    assert (memory.address, memory.how) == (0x234, "through dma-buf")
    assert memory._region.named == {"dmabuf": exported, "offset": 0x234}
    with pytest.raises(OSError):
        os.fstat(exported)  # closed: the region holds the dma-buf itself


def test_memory_that_cannot_be_registered_either_way_says_both_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[int, int]:
        raise OSError("CUDA does not export it (operation not supported)")

    monkeypatch.setattr(_verbs, "export_dma_buf", refuse)
    with pytest.raises(VerbsError, match="Bad address.*does not export"):
        nic(peer_memory=False).register(0x7000_0000, 100, "cuda")
    with pytest.raises(VerbsError, match="Bad address$"):  # the host's memory has no other way
        nic(peer_memory=False).register(0x7000_0000, 100)


class FakeCuda:
    """libcuda's two functions; `code` is what exporting answers."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.asked: tuple[int, int] = (0, 0)

    def cuMemGetHandleForAddressRange(self, fd: Any, start: Any, size: Any, kind: Any, flags: Any) -> int:
        self.asked = start.value, size.value
        fd._obj.value = 77
        return self.code

    def cuGetErrorString(self, code: Any, reason: Any) -> int:
        reason._obj.value = b"invalid argument"
        return 0


def test_whole_pages_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(0)
    monkeypatch.setattr(_verbs.ctypes, "CDLL", lambda _: cuda)
    assert _verbs.export_dma_buf(2 * 4096 + 512, 4096) == (77, 512)
    assert cuda.asked == (2 * 4096, 2 * 4096)
    monkeypatch.setattr(_verbs.ctypes, "CDLL", lambda _: FakeCuda(1))
    with pytest.raises(OSError, match="invalid argument"):
        _verbs.export_dma_buf(0, 4096)


# --- the ring ---


def test_the_last_of_a_read_asks_for_a_completion_and_half_a_ring_without_one_does() -> None:
    ring: Ring[str] = Ring(8)
    assert [ring.post(None)[2] for _ in range(4)] == [False, False, False, True]
    assert ring.post("a") == (4, 5, True)
    assert ring.complete(4) == []
    assert ring.room == 7
    assert ring.complete(5) == ["a"]
    assert not ring.busy


def test_one_completion_stands_for_all_before_it() -> None:
    ring: Ring[str] = Ring(4)
    for token in "abc":
        ring.post(token)
    assert ring.complete(2) == ["a", "b"]
    assert ring.complete(3) == ["c"]


@given(st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=60))
def test_a_ring_never_gets_stuck_nor_full_and_frees_in_order(depth: int, steps: list[tuple[bool, int]]) -> None:
    """A naive model beside it: what is posted, what asks for a completion. Completions come in order, at any time."""
    ring: Ring[int] = Ring(depth)
    posted: list[tuple[int, bool, int | None]] = []  # number, signaled, token
    done: list[int] = []
    count = 0
    for complete, size in steps:
        if complete:
            signaled = [number for number, asks, _ in posted if asks]
            if signaled:
                done += ring.complete(signaled[0])
                posted = [entry for entry in posted if entry[0] > signaled[0]]
        for index in range(size):
            if not ring.room:
                assert any(asks for _, asks, _ in posted), "full, and nothing will ever complete"
                break
            token = count if index == size - 1 else None
            slot, number, asks = ring.post(token)
            assert slot == (number - 1) % depth
            assert len(posted) < depth
            posted.append((number, asks, token))
            count += token is not None
        assert ring.room == depth - len(posted)
    while any(asks for _, asks, _ in posted):
        number = next(number for number, asks, _ in posted if asks)
        done += ring.complete(number)
        posted = [entry for entry in posted if entry[0] > number]
    assert done == list(range(count))
