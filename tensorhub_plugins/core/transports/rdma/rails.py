"""Decisions of rdma that need no verbs: which ports to use, how to register memory, how to cut a segment into reads.

PURE but for `find_ports`, which reads sysfs. A *rail* is a port of the reader and one of the source that face each
other; a transfer uses several in parallel, a whole segment on each.
"""

from __future__ import annotations

import ipaddress
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from tensorhub_plugins.core.errors import ProtocolError, UsageError
from tensorhub_plugins.core.transports.read_plan import parts_in

SYSFS = Path("/sys/class/infiniband")
RAILS_MAX = 4  # in parallel; one host's cards beyond that belong to its other workers
UNRELIABLE = {"efa"}  # drivers of devices without reliable connections
GIDS_MAX = 256  # entries of a port's table that are read
PAGE_SIZE_BYTES = 4096  # memory is registered by whole pages
REGION_SIZE_BYTES_MAX = 1 << 30  # registering holds the GIL: for 0.1 to 0.3 s, not for a whole shard

# --- ports ---


class Port(msgspec.Struct, frozen=True):
    """One usable port of one device. path: its PCI device in sysfs, for distances; "": unknown."""

    device: str
    number: int
    link_layer: str  # "Ethernet" or "InfiniBand"
    gid_index: int
    gid: str
    rate_gbps: float = 0.0
    path: str = ""

    @property
    def name(self) -> str:
        """Return device and port number, as in "mlx5_0:1"."""
        return f"{self.device}:{self.number}"

    def __str__(self) -> str:
        address = ipaddress.IPv6Address(self.gid)
        return f"{self.name} ({self.link_layer}, {address.ipv4_mapped or address}, {self.rate_gbps:g} Gb/s)"


def has_link(sysfs: Path = SYSFS) -> bool:
    """Return whether some port is active, of a device that has reliable connections."""
    return any(
        "ACTIVE" in _read(state) and _driver(state.parents[2]) not in UNRELIABLE
        for state in sysfs.glob("*/ports/*/state")
    )


def find_ports(sysfs: Path = SYSFS, gid_index: int | None = None) -> tuple[list[Port], list[str]]:
    """Return (the usable ports by name, why others are not). gid_index: use this entry of every port's table."""
    ports, reasons = [], []
    for device in sorted(sysfs.iterdir()) if sysfs.is_dir() else []:
        if _driver(device) in UNRELIABLE:
            reasons.append(f"{device.name} is an EFA, which has no reliable connections")
            continue
        folders = device / "ports"
        for folder in sorted(folders.iterdir()) if folders.is_dir() else []:
            name = f"{device.name}:{folder.name}"
            state = _read(folder / "state")
            if "ACTIVE" not in state:
                reasons.append(f"{name} is not active ({state or 'no state'})")
                continue
            link_layer = _read(folder / "link_layer")
            gid = choose_gid(_gids(folder), link_layer, gid_index)
            if gid is None:
                reasons.append(f"{name} has no usable GID" if gid_index is None else f"{name} has no GID {gid_index}")
                continue
            rate = _read(folder / "rate").split(" ")[0]
            path = os.path.realpath(device / "device") if (device / "device").exists() else ""
            try:
                rate_gbps = float(rate)
            except ValueError:
                rate_gbps = 0.0
            ports.append(Port(device.name, int(folder.name), link_layer, *gid, rate_gbps, path))
    return ports, reasons


def choose_gid(
    gids: Sequence[tuple[int, str, str]], link_layer: str, index: int | None = None
) -> tuple[int, str] | None:
    """Return the (index, gid) to connect from. gids: (index, gid, type). RoCEv2 with an IPv4 address can be routed, and
    shows its network; then RoCEv2 with any other address; RoCEv1 last. InfiniBand: only the first one matters."""

    def rank(entry: tuple[int, str, str]) -> tuple[bool, bool, bool, int]:
        number, gid, kind = entry
        address = ipaddress.IPv6Address(gid)
        return "v2" not in kind, address.ipv4_mapped is None, address.is_link_local, number

    usable = [entry for entry in gids if index in (None, entry[0])]
    if not usable:
        return None
    number, gid, _ = usable[0] if link_layer == "InfiniBand" else min(usable, key=rank)
    return number, gid


def choose_ports(
    ports: Sequence[Port], wanted: Sequence[str] | None = None, near: str = "", limit: int = RAILS_MAX
) -> list[Port]:
    """Return the ports to use. wanted: exactly these names ("mlx5_0" or "mlx5_0:1") in this order; UsageError if one is
    not usable. None: the fastest among the nearest to the device at `near` in sysfs ("": all are equally near)."""
    if wanted is not None:
        chosen = []
        for name in wanted:
            found = [port for port in ports if name in (port.device, port.name)]
            if not found:
                raise UsageError(f"RDMA device {name!r} is not usable here; there are {[p.name for p in ports]}")
            chosen += [port for port in found if port not in chosen]
        return chosen
    if not ports:
        return []
    best = max((_closeness(port.path, near), port.rate_gbps) for port in ports)
    return [port for port in ports if (_closeness(port.path, near), port.rate_gbps) == best][:limit]


def pair(reader: Sequence[str], source: Sequence[str], limit: int = RAILS_MAX) -> list[tuple[int, int]]:
    """Return the rails between two hosts, given the link layers of their ports: the first faces the first, and so on,
    since rails are often separate networks. A probe finds out which of them work."""
    rails = [
        (mine, theirs)
        for mine, theirs in zip(range(len(reader)), range(len(source)), strict=False)
        if reader[mine] == source[theirs]
    ]
    return rails[:limit]


def _closeness(path: str, near: str) -> int:
    """Return how many bridges two PCI devices have above them in common; 0 if a location is unknown."""
    if not path or not near:
        return 0
    return len(os.path.commonpath([path, near]).split("/"))


def _driver(device: Path) -> str:
    return Path(os.path.realpath(device / "device" / "driver")).name


def _gids(port: Path) -> list[tuple[int, str, str]]:
    found = []
    for index in range(GIDS_MAX):
        gid = _read(port / "gids" / str(index))
        if not gid:
            break
        if gid.strip("0:"):  # most entries are empty
            found.append((index, gid, _read(port / "gid_attrs" / "types" / str(index))))
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # an empty entry of the table is unreadable
        return ""


# --- memory ---

Extent = tuple[int, int, int]  # stream offset, size in bytes, address


def chunks(
    extents: Iterable[Extent],
    page_size_bytes: int = PAGE_SIZE_BYTES,
    limit: int = REGION_SIZE_BYTES_MAX,
    *,
    allocation: Callable[[int], tuple[int, int]] | None = None,
) -> list[tuple[int, int]]:
    """Return (address, size) of the pieces to register for these extents: as few as possible, none above `limit`.

    Extents whose pages touch become one piece, with what lies between them; pages in between are never included.
    allocation: returns (first, end) of the allocation that contains an address. No piece spans two: neighbours in a
    GPU's memory are exported one by one."""
    merged: list[tuple[int, int]] = []
    first, end = 0, 0  # the allocation of the last piece
    for _, size_bytes, address in sorted(extents, key=lambda extent: extent[2]):
        stop = address + size_bytes
        while address < stop:
            is_other = allocation is not None and not first <= address < end
            if allocation is not None and is_other:
                first, end = allocation(address)
            part = stop if allocation is None else min(stop, end)
            touches = merged and address // page_size_bytes <= -(-merged[-1][1] // page_size_bytes)
            if touches and not is_other:
                merged[-1] = (merged[-1][0], max(merged[-1][1], part))
            else:
                merged.append((address, part))
            address = part
    return [(start, min(limit, stop - start)) for first, stop in merged for start in range(first, stop, limit)]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Stream bytes [start, start + size) at an address of the source; one key for each of its ports."""

    start: Annotated[int, msgspec.Meta(ge=0)]
    size_bytes: Annotated[int, msgspec.Meta(gt=0)]
    address: Annotated[int, msgspec.Meta(ge=0)]
    keys: tuple[int, ...]


def regions(extents: Iterable[Extent], registered: Sequence[tuple[int, int, int, tuple[int, ...]]]) -> list[Region]:
    """Return the extents as a peer may read them. registered: (address, size, that address in reads, keys), sorted,
    from `chunks`."""
    starts = [first for first, _, _, _ in registered]
    found: list[Region] = []
    for start, size_bytes, address in extents:
        while size_bytes:
            first, length, called, keys = registered[bisect_right(starts, address) - 1]
            count = min(size_bytes, first + length - address)
            remote = called + address - first
            last = found[-1] if found else None
            if (
                last is not None
                and last.keys == keys
                and last.start + last.size_bytes == start
                and last.address + last.size_bytes == remote
            ):
                found[-1] = Region(last.start, last.size_bytes + count, last.address, keys)
            else:
                found.append(Region(start, count, remote, keys))
            start, address, size_bytes = start + count, address + count, size_bytes - count
    return found


class RemoteMemory:
    """A source's stream, by the regions that it has announced."""

    def __init__(self, told: Sequence[Region], size_bytes: int, ports: int) -> None:
        """Raise ProtocolError unless they are the whole stream, in order, with a key for each of the source's ports."""
        at = 0
        for region in told:
            if region.start != at or len(region.keys) != ports:
                raise ProtocolError(f"the source's memory has a hole or no key at offset {at} of its stream")
            at += region.size_bytes
        if at != size_bytes:
            raise ProtocolError(f"the source's memory has {at} bytes, its manifest {size_bytes}")
        self._regions = told
        self._starts = [region.start for region in told]

    def pieces(self, start: int, stop: int, port: int) -> Iterator[tuple[int, int, int]]:
        """Yield (address, size, key) of the pieces of a stream range."""
        for index, skip, size_bytes in parts_in(self._starts, start, stop):
            region = self._regions[index]
            yield region.address + skip, size_bytes, region.keys[port]


def cut_reads(
    remote: Iterable[tuple[int, int, int]], local: Iterable[tuple[int, int, int]], limit: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Cut two lists of (address, size, key), of equal total size, into reads that are contiguous at both ends and at
    most `limit` bytes: (remote address, remote key, local address, local key, size)."""
    places = iter(local)
    at = left = local_key = 0
    for address, size_bytes, key in remote:
        while size_bytes:
            while not left:
                at, left, local_key = next(places)
            count = min(size_bytes, left, limit)
            yield address, key, at, local_key, count
            address, size_bytes, at, left = address + count, size_bytes - count, at + count, left - count
