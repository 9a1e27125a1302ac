"""Our side of verbs over a binding that is made up: errors in words, memory of a device, the ring."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.device.drivers import Plain
from tensorhub_plugins.core.transports.rdma import bindings
from tensorhub_plugins.core.transports.rdma import verbs as _verbs
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.rails import Port
from tensorhub_plugins.core.transports.rdma.verbs import Ring, status_name, why_not

PORT = Port("mlx5_0", 1, "Ethernet", 3, "::ffff:10.0.0.1")


def test_without_a_device_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "usable", lambda: pytest.fail("a binding was looked for"))
    for sysfs in (tmp_path, tmp_path / "missing"):
        reason = why_not(sysfs)
        assert reason is not None and "no RDMA device" in reason


def test_without_a_binding_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> list[bindings.Binding]:
        raise VerbsError("libibverbs.so.1 cannot be loaded")

    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(bindings, "usable", none)
    assert why_not(tmp_path) == "libibverbs.so.1 cannot be loaded"
    monkeypatch.setattr(bindings, "usable", list)
    assert why_not(tmp_path) is None


def test_errors_have_the_names_of_verbs() -> None:
    assert [status_name(number) for number in (4, 5, 10, 12)] == [
        "LOC_PROT_ERR",
        "WR_FLUSH_ERR",
        "REM_ACCESS_ERR",
        "RETRY_EXC_ERR",
    ]
    assert status_name(99) == "status 99"


class PyverbsRDMAError(Exception):
    error_code = 12


@pytest.mark.parametrize("error", [PyverbsRDMAError("no. "), OSError(errno.ENOMEM, "no")])
def test_foreign_errors_are_translated_and_the_limit_is_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_verbs.resource, "getrlimit", lambda _: (8192 << 10, 8192 << 10))
    expected = r"^cannot register 5 bytes: no(\. )?; .* 8192 KiB.*ulimit -l"
    with pytest.raises(VerbsError, match=expected) as raised, _verbs._translated("register 5 bytes"):
        raise error
    assert resources.refusal(raised.value) is None  # or no other transport would be tried


def test_the_next_binding_is_tried_and_all_reasons_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def open_card(self, device: str, port: int) -> bindings.Card:
            raise OSError(errno.EACCES, "ibv_open_device: Permission denied")

    class Opens:
        def open_card(self, device: str, port: int) -> tuple[str, int]:
            return device, port

    monkeypatch.setattr(bindings, "usable", lambda: [Refuses(), Opens()])
    assert _verbs._open_card(PORT) == ("mlx5_0", 1)
    monkeypatch.setattr(bindings, "usable", lambda: [Refuses(), Refuses()])
    with pytest.raises(VerbsError, match=r"cannot open mlx5_0: (ibv_open_device: Permission denied(; )?){2}$"):
        _verbs._open_card(PORT)


# --- memory of a device ---


class FakeRegion:
    lkey, rkey = 1, 2

    def __init__(self, *how: int) -> None:
        self.how, self.address = how, how[-1]

    def close(self) -> None:
        pass


class FakeCard:
    """One that registers addresses of the host, and those of a device only with peer memory."""

    def __init__(self, *, peer_memory: bool) -> None:
        self.peer_memory = peer_memory

    def register(self, address: int, size_bytes: int) -> FakeRegion:
        if not self.peer_memory:
            raise OSError(errno.EFAULT, "ibv_reg_mr: Bad address")
        return FakeRegion(address)

    def register_dma_buf(self, fd: int, offset: int, size_bytes: int, address: int) -> FakeRegion:
        os.fstat(fd)
        return FakeRegion(fd, offset, size_bytes, address)


def nic(*, peer_memory: bool) -> _verbs.Nic:
    made = object.__new__(_verbs.Nic)
    made.port, made.card = PORT, FakeCard(peer_memory=peer_memory)  # type: ignore[assignment]
    made._guard, made._closing, made._users = threading.Lock(), False, 0
    return made


class Exports(Plain):
    """A device's driver that exports this file, or refuses."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.asked = (0, 0)

    def export_dma_buf(self, start: int, size_bytes: int) -> int:
        self.asked = start, size_bytes
        if self.file is None:
            raise OSError("CUDA's cuMemGetHandleForAddressRange: operation not supported")
        return os.open(self.file, os.O_RDONLY)


def test_memory_of_a_device_is_registered_as_it_is_where_peer_memory_is_there() -> None:
    driver = Exports(None)
    memory = nic(peer_memory=True).register(0x7000_1234, 100, Device("cuda:0", driver))
    assert (memory.address, memory.how, driver.asked) == (0x7000_1234, "by peer memory", (0, 0))


def test_else_as_a_dma_buf_of_whole_pages(tmp_path: Path) -> None:
    driver = Exports(tmp_path)
    memory = nic(peer_memory=False).register(2 * 4096 + 512, 4096, Device("cuda:0", driver))
    assert driver.asked == (2 * 4096, 2 * 4096)
    assert memory.how == "through dma-buf"
    fd, *how = memory._region.how  # type: ignore[attr-defined]
    assert how == [512, 4096, 2 * 4096 + 512]
    with pytest.raises(OSError):
        os.fstat(fd)  # closed: the region holds the dma-buf itself


def test_memory_that_cannot_be_registered_either_way_says_both_reasons() -> None:
    with pytest.raises(VerbsError, match="of cuda:0 .*Bad address.*operation not supported"):
        nic(peer_memory=False).register(0x7000_0000, 100, Device("cuda:0", Exports(None)))
    with pytest.raises(VerbsError, match="Bad address$"):  # the host's memory has no other way
        nic(peer_memory=False).register(0x7000_0000, 100)


# --- the ring ---


def test_the_last_of_a_read_asks_for_a_completion_and_half_a_ring_without_one_does() -> None:
    ring: Ring[str] = Ring(8)
    assert [ring.post(None)[1] for _ in range(4)] == [False, False, False, True]
    assert ring.post("a") == (5, True)
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
            number, asks = ring.post(token)
            assert len(posted) < depth
            posted.append((number, asks, token))
            count += token is not None
        assert ring.room == depth - len(posted)
    while any(asks for _, asks, _ in posted):
        number = next(number for number, asks, _ in posted if asks)
        done += ring.complete(number)
        posted = [entry for entry in posted if entry[0] > number]
    assert done == list(range(count))
