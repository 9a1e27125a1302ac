"""What rdma decides without verbs: ports, GIDs, what to register, which reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import Simulation

from tensorhub_plugins.core.errors import ProtocolError, UsageError
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.rdma.rails import (
    PAGE_SIZE_BYTES,
    Port,
    Region,
    RemoteMemory,
    choose_gid,
    choose_ports,
    chunks,
    cut_reads,
    find_ports,
    has_link,
    pair,
    regions,
)
from tensorhub_plugins.core.transports.rdma.registration import Registry

LINK_LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"


# --- ports ---


def device(
    sysfs: Path,
    name: str,
    *,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    gids: tuple[tuple[str, str], ...] = ((LINK_LOCAL, V1), (LINK_LOCAL, V2), (EMPTY, ""), (IPV4, V1), (IPV4, V2)),
    driver: str = "mlx5_core",
    pci: str = "pci0000:00/0000:00:01.0/0000:01:00.0",
) -> None:
    """As the kernel shows it, with the device's link into the PCI tree."""
    place = sysfs.parent / "devices" / pci
    drivers = sysfs.parent / "drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "driver").exists():
        (place / "driver").symlink_to(drivers)
    folder = sysfs / name / "ports" / "1"
    (folder / "gids").mkdir(parents=True)
    (folder / "gid_attrs" / "types").mkdir(parents=True)
    (sysfs / name / "device").symlink_to(place)
    (folder / "state").write_text(state + "\n")
    (folder / "link_layer").write_text(link_layer + "\n")
    (folder / "rate").write_text("100 Gb/sec (4X EDR)\n")
    for index, (gid, kind) in enumerate(gids):
        (folder / "gids" / str(index)).write_text(gid + "\n")
        if kind:  # an empty entry's type cannot be read
            (folder / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    folder = tmp_path / "infiniband"
    folder.mkdir()
    return folder


def test_a_port_as_the_kernel_shows_it(sysfs: Path) -> None:
    device(sysfs, "mlx5_0")
    (port,), reasons = find_ports(sysfs)
    assert (port.name, port.gid_index, port.gid, port.rate_gbps, reasons) == ("mlx5_0:1", 4, IPV4, 100.0, [])
    assert port.path.endswith("0000:01:00.0")
    assert str(port) == "mlx5_0:1 (Ethernet, 10.0.0.1, 100 Gb/s)"


def test_what_cannot_be_used_and_why(sysfs: Path) -> None:
    device(sysfs, "down", state="1: DOWN")
    device(sysfs, "efa_0", driver="efa", pci="pci0000:00/0000:00:02.0")
    device(sysfs, "nogid", gids=((EMPTY, ""),))
    ports, reasons = find_ports(sysfs)
    assert ports == []
    assert [reason.split(" ")[0] for reason in reasons] == ["down:1", "efa_0", "nogid:1"]
    assert "reliable connections" in reasons[1]


def test_no_sysfs_at_all(tmp_path: Path) -> None:
    assert find_ports(tmp_path / "missing") == ([], [])
    assert not has_link(tmp_path / "missing")


def test_a_card_that_has_a_link_is_missed_when_it_is_not_used(sysfs: Path) -> None:
    device(sysfs, "down", state="1: DOWN")
    device(sysfs, "efa_0", driver="efa", pci="pci0000:00/0000:00:02.0")
    assert not has_link(sysfs)
    device(sysfs, "nogid", gids=((EMPTY, ""),))
    assert has_link(sysfs)


def test_a_configured_gid_index_holds(sysfs: Path) -> None:
    device(sysfs, "mlx5_0")
    (port,), _ = find_ports(sysfs, gid_index=1)
    assert (port.gid_index, port.gid) == (1, LINK_LOCAL)
    ports, reasons = find_ports(sysfs, gid_index=2)
    assert ports == [] and reasons == ["mlx5_0:1 has no GID 2"]


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        ([(0, LINK_LOCAL, V1), (1, LINK_LOCAL, V2), (2, IPV4, V1), (3, IPV4, V2)], 3),
        ([(0, IPV4, V1), (1, LINK_LOCAL, V2)], 1),
        ([(0, LINK_LOCAL, V2), (1, GLOBAL, V2)], 1),
        ([(0, LINK_LOCAL, V1), (1, IPV4, V1)], 1),
        ([(5, IPV4, V2), (3, IPV4, V2)], 3),
    ],
)
def test_which_gid(gids: list[tuple[int, str, str]], chosen: int) -> None:
    found = choose_gid(gids, "Ethernet")
    assert found is not None and found[0] == chosen


def test_the_gid_of_infiniband_is_the_first() -> None:
    assert choose_gid([(0, LINK_LOCAL, V1), (1, IPV4, V2)], "InfiniBand") == (0, LINK_LOCAL)
    assert choose_gid([], "InfiniBand") is None


def port(name: str, rate: float = 100.0, path: str = "") -> Port:
    return Port(name, 1, "Ethernet", 0, IPV4, rate, path)


def names(ports: list[Port]) -> list[str]:
    return [each.device for each in ports]


def test_the_fastest_ports_and_not_too_many() -> None:
    assert names(choose_ports([port("a", 25), port("b"), port("c")])) == ["b", "c"]
    assert len(choose_ports([port(str(i)) for i in range(9)])) == 4
    assert choose_ports([]) == []


def test_the_ports_nearest_to_the_tensors_device() -> None:
    root = "/sys/devices/pci0000:00"
    far, near, nearest = (
        port("far", path="/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0"),
        port("near", path=f"{root}/0000:00:02.0/0000:02:00.0"),
        port("nearest", 50, path=f"{root}/0000:00:01.0/0000:01:00.0/0000:05:00.0"),
    )
    gpu = f"{root}/0000:00:01.0/0000:01:00.0/0000:04:00.0"
    assert names(choose_ports([far, near, nearest], near=gpu)) == ["nearest"]
    assert names(choose_ports([far, near], near=gpu)) == ["near"]
    assert names(choose_ports([far, near, nearest])) == ["far", "near"]  # host memory: speed alone


def test_configuration_overrides_all() -> None:
    ports = [port("a"), port("b", 25), port("c")]
    assert names(choose_ports(ports, ["b:1", "a", "b"])) == ["b", "a"]
    with pytest.raises(UsageError, match="'d' is not usable.*'a:1', 'b:1', 'c:1'"):
        choose_ports(ports, ["a", "d"])


def test_rails_join_what_is_alike() -> None:
    assert pair(["Ethernet"] * 2, ["Ethernet"] * 3) == [(0, 0), (1, 1)]
    assert pair(["InfiniBand", "Ethernet"], ["Ethernet", "Ethernet"]) == [(1, 1)]
    assert len(pair(["Ethernet"] * 9, ["Ethernet"] * 9)) == 4
    assert pair([], ["Ethernet"]) == []


# --- memory ---


def test_neighbours_are_registered_together_and_strangers_are_not() -> None:
    page = PAGE_SIZE_BYTES
    extents = [
        (0, 100, 5 * page + 10),
        (100, 50, 5 * page + 200),
        (150, 10, 6 * page),
        (160, 10, 9 * page),
        (170, 0, 0),
    ]
    assert chunks(extents) == [(5 * page + 10, page), (9 * page, 10)]


def test_much_memory_is_registered_piece_by_piece() -> None:
    assert chunks([(0, 10, 100)], limit=4) == [(100, 4), (104, 4), (108, 2)]


def test_neighbours_of_two_allocations_are_registered_one_by_one() -> None:
    """A15: a GPU's driver exports one allocation at a time, wherever the next one begins."""
    page = PAGE_SIZE_BYTES

    def allocation(address: int) -> tuple[int, int]:
        assert 2 * page <= address < 8 * page
        return (2 * page, 5 * page) if address < 5 * page else (5 * page, 8 * page)

    extents = [(0, page, 2 * page), (page, 3 * page, 3 * page), (4 * page, 10, 6 * page), (4 * page + 10, 0, 0)]
    assert chunks(extents) == [(2 * page, 4 * page + 10)]
    assert chunks(extents, allocation=allocation) == [(2 * page, 3 * page), (5 * page, page + 10)]


@pytest.mark.parametrize("is_of_a_device", [True, False])
def test_a_device_is_asked_where_its_allocations_end(is_of_a_device: bool) -> None:
    """Whatever comes first, a tensor without bytes for example. The control: the host's memory is one piece."""
    memory = torch.empty(4 * PAGE_SIZE_BYTES, dtype=torch.uint8)
    halves = dict(zip(("a", "b"), torch.chunk(memory, 2), strict=True))
    with Simulation(0) as simulation:
        if is_of_a_device:
            for half in halves.values():
                simulation.take(half)
        with Slab.adopt({"nothing": torch.empty(0), **halves}) as slab:
            found = Registry([]).of(slab)._chunks
    assert sum(size_bytes for _, size_bytes in found) == memory.numel()
    assert [address for address, _ in found] == [half.data_ptr() for half in halves.values()][: 1 + is_of_a_device]


def test_one_region_where_stream_and_memory_go_on_together() -> None:
    registered = [(1000, 100, 1000, (1, 2))]
    assert regions([(0, 40, 1000), (40, 60, 1040)], registered) == [Region(0, 100, 1000, (1, 2))]
    assert regions([(0, 40, 1060), (40, 60, 1000)], registered) == [
        Region(0, 40, 1060, (1, 2)),
        Region(40, 60, 1000, (1, 2)),
    ]


def test_what_a_dma_buf_holds_is_named_by_its_place_in_it() -> None:
    registered = [(1000, 100, 24, (1,)), (1100, 50, 12, (2,))]
    assert regions([(0, 40, 1060), (40, 20, 1090)], registered) == [
        Region(0, 40, 84, (1,)),
        Region(40, 10, 114, (1,)),
        Region(50, 10, 12, (2,)),
    ]


@pytest.mark.parametrize(
    "told",
    [
        [Region(0, 5, 100, (1,)), Region(6, 5, 200, (1,))],  # a hole
        [Region(0, 5, 100, (1,)), Region(4, 7, 200, (1,))],  # twice
        [Region(0, 10, 100, (1,))],  # too short
        [Region(0, 12, 100, (1,))],  # too long
        [Region(0, 11, 100, ())],  # no key
        [],
    ],
)
def test_a_source_that_tells_nonsense(told: list[Region]) -> None:
    with pytest.raises(ProtocolError):
        RemoteMemory(told, 11, 1)


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(sizes, sizes, st.integers(1, 30), st.data())
def test_reads_move_every_byte_to_its_place(
    remote_sizes: list[int], local_sizes: list[int], limit: int, data: st.DataObject
) -> None:
    """Against the naive way: byte by byte."""
    total = min(sum(remote_sizes), sum(local_sizes))

    def laid_out(sizes: list[int], base: int) -> list[tuple[int, int, int]]:
        pieces, left, at = [], total, base
        for key, size in enumerate(sizes):
            size = min(size, left)
            if size:
                pieces.append((at, size, key))
            at, left = at + size + data.draw(st.integers(0, 3)), left - size
        return pieces

    remote, local = laid_out(remote_sizes, 1000), laid_out(local_sizes, 90_000)

    def each(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(at + i, key) for at, size, key in pieces for i in range(size)]

    moved = []
    for remote_at, remote_key, local_at, local_key, size in cut_reads(remote, local, limit):
        assert 0 < size <= limit
        moved += [((remote_at + i, remote_key), (local_at + i, local_key)) for i in range(size)]
    assert moved == list(zip(each(remote), each(local), strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9000)), min_size=1, max_size=20),
    st.integers(50, 400),
    st.none() | st.integers(100, 5000),
)
def test_every_byte_is_registered_and_found_again(
    tensors: list[tuple[int, int]], limit: int, allocation_size_bytes: int | None
) -> None:
    """Tensors of any size with any gaps between them, in memory in another order than in the stream. Allocations of one
    size, or none that are known."""

    def allocation(address: int) -> tuple[int, int]:
        assert allocation_size_bytes is not None
        first = address // allocation_size_bytes * allocation_size_bytes
        return first, first + allocation_size_bytes

    extents, stream, address = [], 0, 1 << 20
    for size, gap in tensors:
        extents.append((stream, size, address))
        stream, address = stream + size, address + size + gap
    extents = [(start, size, (2 << 20) - at - size) for start, size, at in extents]  # backwards
    pieces = chunks(extents, limit=limit, allocation=allocation if allocation_size_bytes else None)
    assert all(0 < size <= limit for _, size in pieces)
    if allocation_size_bytes:
        assert all(at + size <= allocation(at)[1] for at, size in pieces)
    registered = [(at, size, at, (index,)) for index, (at, size) in enumerate(pieces)]
    told = regions(extents, registered)
    memory = RemoteMemory(told, stream, 1)
    expected = [at + i for _, size, at in extents for i in range(size)]
    found = []
    for at, size, key in memory.pieces(0, stream, 0):
        first, length, _, _ = registered[key]
        assert first <= at and at + size <= first + length, "outside of what was registered"
        found += range(at, at + size)
    assert found == expected
