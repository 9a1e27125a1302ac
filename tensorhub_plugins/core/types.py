"""Immutable data types that all modules share: shards, versions, locations of workers. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard, cast

import msgspec

from tensorhub_plugins.core.errors import UsageError

VERSION_MAX = 1 << 48  # what a message can hold
VERSION_LENGTH_MAX = 32  # of its text, with zeros before it
STEPS_PER_ATTEMPT = 10**9  # version = attempt * STEPS_PER_ATTEMPT + step: a restarted trainer makes newer ones
STEPS_AHEAD_MAX = (
    10**6
)  # above the newest version of a model: more is a mistake, and readers would never go below it again
ATTEMPTS_MAX = VERSION_MAX // STEPS_PER_ATTEMPT  # 281,474 starts of one trainer
SHARDS_MAX = 1 << 16
NAME_LENGTH_MAX = 256  # characters of a run, model, replica, layout
HOSTS_MAX = 4  # that one worker advertises: of both families, of two networks
MACHINE_LENGTH_MAX = 64  # characters of the id of a boot, which has 36
RECENT_S = 600.0  # for so long people are shown what has happened to a process
LATEST = "latest"
# What decoding untrusted bytes raises, for example for text that is no UTF-8, and for deeply nested arrays.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
CHECKPOINT = "checkpoint"  # the layout of Hugging Face names, unfused
COMPILED = ".compiled-"  # in the name of a history that is no model's but of what engines compile: it has no trainer
Role: TypeAlias = Literal["publisher", "reader", "observer"]  # what a key permits, see hub/permissions.py
Across: TypeAlias = Literal["host", "rack", "data_center"]  # what may fail as a unit
DOMAINS_MAX = 16  # failure domains in which copies are kept
HOST, DATA_CENTER, FAR = 0, 2, 3  # distances


# Characters that move the cursor, end a line or change the direction of writing are not allowed in a name: they would
# forge lines of logs.
CONTROL = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"
    r"\U000e0000-\U000e007f"
)
PRINTABLE = rf"^[^{CONTROL}]*\Z"  # the pattern of a name, checked where one is decoded
Place: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX, pattern=PRINTABLE)]


Hosts: TypeAlias = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX, pattern=PRINTABLE)], ...],
    msgspec.Meta(max_length=HOSTS_MAX - 1),
]  # of a worker, beside that of its endpoints


class Location(msgspec.Struct, frozen=True, gc=False):
    """Where a worker is, from far to near; an empty string means unknown.

    machine: its id, which the client sets, unless the host was named explicitly. It tells hosts apart: two pods of a
    machine, which have names of their own, are one host, and two machines with the same name are two."""

    data_center: Place = ""
    rack: Place = ""
    host: Place = ""
    machine: Annotated[str, msgspec.Meta(max_length=MACHINE_LENGTH_MAX, pattern=PRINTABLE)] = ""

    @property
    def host_id(self) -> str:
        """Return what tells this host from others; "": unknown."""
        return self.machine or self.host


TRANSPORTS = ("shm", "cuda_ipc", "tcp", "tls", "rdma")
DISTANCES = ("same_host", "same_rack", "same_data_center", "other_data_center")  # by what `distance` returns

Came: TypeAlias = tuple[str, int, int]  # of one shard from one source: by which way, bytes, and bytes sent for them
NOTHING: Came = ("", 0, 0)
WAYS = frozenset(f"{where} {transport}" for where in DISTANCES for transport in TRANSPORTS)  # how bytes were read


def distance(a: Location, b: Location) -> int:
    """Return 0 for the same host, 1 same rack, 2 same data centre, 3 farther. Unknown data centres count as one."""
    if a.data_center != b.data_center:
        return FAR
    if a.host_id and a.host_id == b.host_id:
        return HOST
    if a.rack and a.rack == b.rack:
        return 1
    return DATA_CENTER


def domain(place: Location, across: Across) -> tuple[str, ...]:
    """Return what fails together with this location. Locations where that is unknown count as one."""
    parts = place.data_center, place.rack, place.host_id
    return parts[: {"data_center": 1, "rack": 2, "host": 3}[across]]


class ShardKey(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Names one shard of one replica of one version: what a lease is for and what a peer opens."""

    version: Annotated[int, msgspec.Meta(ge=1, le=VERSION_MAX)]  # limits hold where one is decoded
    layout: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX, pattern=PRINTABLE)]
    shard: Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)] = 0
    shard_count: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)] = 1

    def __str__(self) -> str:
        return f"version {self.version}, {self.layout}, shard {self.shard}/{self.shard_count}"


class VersionInfo(msgspec.Struct, frozen=True):
    """What the hub knows of one version. `layouts` maps a layout to the workers ("replica/shard") that hold it."""

    version: int
    visible: bool
    layouts: dict[str, tuple[str, ...]]


def check_version(version: object, what: str = "version") -> int:
    """Return version as an int, or raise UsageError: versions are positive integers that only grow."""
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION_MAX:
        raise UsageError(f"{what} must be a positive integer (the framework's global step), not {version!r}")
    return version


def attempt_of(version: int) -> int:
    """Return the trainer's attempt that made this version; 0: one that never began any. Later attempts are newer."""
    return version // STEPS_PER_ATTEMPT


def step_of(version: int) -> int:
    """Return the framework's global step, which users see of a version. 0 for no version."""
    return version % STEPS_PER_ATTEMPT


def version_of(attempt: int, step: int) -> int:
    """Return the version of this step in this attempt, ordered as (attempt, step). Raise UsageError out of bounds."""
    are_numbers = type(step) is int and type(attempt) is int
    if not are_numbers or not 0 <= step < STEPS_PER_ATTEMPT or not 0 <= attempt < ATTEMPTS_MAX:
        raise UsageError(
            f"step {step!r} of attempt {attempt!r}: a step is below {STEPS_PER_ATTEMPT}, "
            f"an attempt below {ATTEMPTS_MAX}"
        )
    return attempt * STEPS_PER_ATTEMPT + step


def steps_behind(version: int, newest: int) -> int:
    """Return by how many steps a version is behind the newest one: 1 at least, when it is of a former attempt."""
    steps = step_of(newest) - step_of(version)
    return steps if attempt_of(version) == attempt_of(newest) else max(1, steps)


def version_text(version: int) -> str:
    """Return a version as text for users: "6", or "6 of attempt 1"."""
    attempt, step = attempt_of(version), step_of(version)
    return f"{step} of attempt {attempt}" if attempt else str(step)


def version_label(version: int) -> str:
    """Return the same, short, for tables: "6", or "1/6" (attempt/step)."""
    attempt, step = attempt_of(version), step_of(version)
    return f"{attempt}/{step}" if attempt else str(step)


def parse_version(text: str) -> int:
    """Return the version that users write as a number, or as `version_label`. Raise UsageError for anything else."""
    attempt, slash, step = text.rpartition("/")
    is_short = text.isascii() and len(text) <= VERSION_LENGTH_MAX
    if not (is_short and step.isdigit() and (attempt.isdigit() if slash else True)):
        raise UsageError(f"version {text!r:.80}: give a step, or attempt/step as `tensorhub status` shows it: 1/6")
    return check_version(version_of(int(attempt), int(step)) if slash else int(step))


def check_name(what: str, name: object) -> str:
    """Return the name of a run, model, replica or layout, or raise UsageError."""
    if not is_text(name) or not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise UsageError(f"{what} must be a text of 1 to {NAME_LENGTH_MAX} characters, not {name!r:.80}")
    if printable(name) != name:
        raise UsageError(f"{what} has characters that control how it is printed: {name!r:.80}")
    return name


def printable(text: str) -> str:
    """Return the text with escapes in place of characters that control how it is printed."""
    if text.isascii() and text.isprintable():
        return text
    return re.sub(f"[{CONTROL}]", lambda found: found[0].encode("unicode_escape").decode(), text)


def items_of(given: object, what: str, needed: str) -> Iterator[Any]:
    """Return an iterator over what was given, or raise UsageError: also for a tensor or array without dimensions, which
    has the method and no items."""
    try:
        return iter(cast("Iterable[Any]", given))
    except TypeError:
        raise UsageError(f"{what}={given!r:.80}: give {needed}") from None


def is_text(name: object) -> TypeGuard[str]:
    """Return whether a message can hold it as text: no subclass of str, and no half of a surrogate pair."""
    if type(name) is not str:
        return False
    try:
        return name.isascii() or bool(name.encode())
    except UnicodeEncodeError:
        return False
