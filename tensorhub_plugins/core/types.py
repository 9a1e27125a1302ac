"""Immutable data types that all modules share: shards, versions, locations of workers. PURE."""

from __future__ import annotations

from typing import Annotated, TypeGuard

import msgspec

from tensorhub_plugins.core.errors import UsageError

VERSION_MAX = 1 << 48  # what a message can hold; a step every microsecond for nine years
SHARDS_MAX = 1 << 16
NAME_LENGTH_MAX = 256  # characters of a run, model, replica, layout
LATEST = "latest"
CHECKPOINT = "checkpoint"  # the layout of Hugging Face names, unfused
HOST, DATA_CENTER, FAR = 0, 2, 3  # distances


class Location(msgspec.Struct, frozen=True, gc=False):
    """Where a worker is, from far to near; an empty string means unknown."""

    data_center: str = ""
    rack: str = ""
    host: str = ""


def distance(a: Location, b: Location) -> int:
    """0 same host, 1 same rack, 2 same data centre, 3 farther. Unknown data centres count as one."""
    if a.data_center != b.data_center:
        return FAR
    if a.host and a.host == b.host:
        return HOST
    if a.rack and a.rack == b.rack:
        return 1
    return DATA_CENTER


class ShardKey(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Names one shard of one replica of one version: what a lease is for and what a peer opens."""

    version: Annotated[int, msgspec.Meta(ge=1, le=VERSION_MAX)]  # limits hold where one is decoded
    layout: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
    shard: Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)] = 0
    shard_count: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)] = 1

    def __str__(self) -> str:
        return f"version {self.version}, {self.layout}, shard {self.shard}/{self.shard_count}"


class VersionInfo(msgspec.Struct, frozen=True):
    """What the hub knows of one version. `layouts` maps a layout to the workers ("replica/shard") that hold it."""

    version: int
    visible: bool
    layouts: dict[str, tuple[str, ...]]


def check_version(version: object) -> int:
    """Return version as an int, or raise UsageError: versions are positive integers that only grow."""
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION_MAX:
        raise UsageError(f"version must be a positive integer (the framework's global step), not {version!r}")
    return version


def check_name(what: str, name: object) -> str:
    """Return the name of a run, model, replica or layout, or raise UsageError."""
    if not is_text(name) or not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise UsageError(f"{what} must be a text of 1 to {NAME_LENGTH_MAX} characters, not {name!r:.80}")
    return name


def is_text(name: object) -> TypeGuard[str]:
    """Whether a message can hold it as a text: no subclass of str, and no half of a surrogate pair."""
    if type(name) is not str:
        return False
    try:
        return name.isascii() or bool(name.encode())
    except UnicodeEncodeError:
        return False
