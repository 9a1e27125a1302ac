"""The arguments of a client, checked, and the transports that work on this host."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast, get_args

import msgspec

from tensorhub_plugins.core.deadline import Deadline, timeout_for, until
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import TensorSpec, TensorTable
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.options import Delta
from tensorhub_plugins.core.process_lifetime import machine
from tensorhub_plugins.core.protocol.advertised import Advertised
from tensorhub_plugins.core.protocol.messages import REFUSED_MAX, RETAIN_MAX
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.transports import (
    DEFAULT_TRANSPORTS,
    Transport,
    TransportLimits,
    create,
    expected,
    unavailable,
)
from tensorhub_plugins.core.types import (
    DOMAINS_MAX,
    NAME_LENGTH_MAX,
    SHARDS_MAX,
    Across,
    Location,
    ShardKey,
    check_name,
    check_version,
    is_text,
    items_of,
    printable,
)

LAYOUTS_MAX = 8  # in one fetch
REASON_LENGTH_MAX = 1000  # of why a version was refused, which the hub keeps
PREEMPTIBLE_VARIABLE = "TENSORHUB_PREEMPTIBLE"

log = logging.getLogger("tensorhub.client")


def check_identity(shard: int, shard_count: int, **names: str) -> None:
    """Raise UsageError unless these name one shard of one replica."""
    for what, name in names.items():
        check_name(what, name)
    if {type(shard), type(shard_count)} != {int} or not 0 <= shard < shard_count <= SHARDS_MAX:
        raise UsageError(f"shard {shard!r:.80} of {shard_count!r:.80}: shards count from 0, {SHARDS_MAX} at most")


def check_flags(**flags: object) -> None:
    """Raise UsageError unless each is True or False, or numpy's."""
    for what, flag in flags.items():
        if type(flag).__name__ not in ("bool", "bool_"):
            raise UsageError(f"{what}={flag!r:.80}: True or False")


def check_installed(what: str, version: object) -> None:
    """Raise UsageError unless this is a version, or 0 for none."""
    if type(version) is not int or version != 0:
        check_version(version, what)


def check_target(installed: object, refused: object, *, pins: object) -> tuple[tuple[int, ...], str]:
    """Return the last of the versions that were refused, and why the newest was, as far as known. Raise UsageError for
    what no follower can have."""
    check_flags(pins=pins)
    check_installed("installed", installed)
    given = items_of(refused, "refused", "a list of versions")
    versions = tuple(check_version(each, "each version in refused") for each in given)[-REFUSED_MAX:]
    why = refused[max(versions)] if isinstance(refused, Mapping) and versions else ""
    return versions, reason(why)


def reason(why: object) -> str:
    """Return it as a message can hold it: a file's name is no text, say."""
    return str(why)[:REASON_LENGTH_MAX].encode(errors="replace").decode()


def check_failure(failure: object) -> str:
    """Return why the last try failed, as a message can hold it. Raise UsageError for what is no text."""
    if not isinstance(failure, str):
        raise UsageError(f"failure={failure!r:.80}: a text, which may be empty")
    return reason(failure)


def check_count(count: object) -> int:
    """Return how many slabs to reserve. Raise UsageError for what is no number of them."""
    if type(count) is not int or count < 0:
        raise UsageError(f"count={count!r:.80}: how many slabs, 0 or more")
    return count


def check_offered(version: object, layout: object, timeout_s: float | None = None) -> None:
    """Raise UsageError unless this is a version, in one layout or (None) in all, and a time or None."""
    check_version(version)
    timeout_for(timeout_s, 0)
    if layout is not None:
        check_name("layout", layout)


def check_key(key: object) -> ShardKey:
    """Return the name of a shard, or raise UsageError."""
    if not isinstance(key, ShardKey):
        raise UsageError(f"key={key!r:.80}: a ShardKey(version, layout, shard, shard_count)")
    return key


def check_layouts(layouts: Sequence[str], **flags: object) -> None:
    """Raise UsageError unless these are layouts, not too many, and these are flags."""
    check_flags(**flags)
    if isinstance(layouts, str) or not isinstance(layouts, Sequence) or not 1 <= len(layouts) <= LAYOUTS_MAX:
        raise UsageError(f"layouts={layouts!r}: give a list of 1 to {LAYOUTS_MAX} layouts, the preferred one first")


def check_delta(delta: str) -> Delta:
    """Return it, or raise UsageError for another word."""
    if delta not in get_args(Delta):
        raise UsageError(f"delta={delta!r:.80}: choose auto or off")
    return cast(Delta, delta)


def check_budget(budget_bytes: object, over_budget: object) -> None:
    """Raise UsageError unless this is a number of bytes, and what to do beyond it."""
    if budget_bytes is not None and (type(budget_bytes) is not int or budget_bytes < 0):
        raise UsageError(f"memory_budget_bytes={budget_bytes!r}: a number of bytes, or None for half of the memory")
    if over_budget not in ("warn", "refuse"):
        raise UsageError(f"over_budget={over_budget!r}: 'warn' or 'refuse'")


def check_word(what: str, word: object) -> str:
    """Return a text that may be empty. Raise UsageError for what no message can hold."""
    if not is_text(word) or len(word) > NAME_LENGTH_MAX or printable(word) != word:
        raise UsageError(f"{what}={word!r:.80}: a text of at most {NAME_LENGTH_MAX} characters that can be printed")
    return word


def check_location(location: object) -> Location:
    """Return a location. Raise UsageError for what no Hello can hold."""
    if not isinstance(location, Location):
        raise UsageError(f"location={location!r:.80}: a Location(data_center, rack, host), or None for this host's")
    for what in location.__struct_fields__:
        check_word(f"location.{what}", getattr(location, what))
    return location


def checked_specs(specs: Iterable[TensorSpec], deadline: float, what: str = "specs") -> Iterator[TensorSpec]:
    """Yield these, for reading or for memory. Raise UsageError for what is none, DeadlineExceeded at the deadline."""
    if type(deadline) not in (Deadline, float, int):
        raise UsageError(f"deadline={deadline!r:.80}: a Deadline, as `Deadline.after(seconds)` makes it")
    given = items_of(specs, what, "a list of TensorSpec, as `spec_of(name, tensor)` makes them")
    for spec in until(deadline, given):
        if not isinstance(spec, TensorSpec):
            raise UsageError(f"{what}: {spec!r:.80} is no TensorSpec, as `spec_of(name, tensor)` makes them")
        yield spec


def wanted_table(specs: Iterable[TensorSpec], deadline: float) -> TensorTable:
    """Return the tensors that are wanted of a checkpoint. Raise UsageError, DeadlineExceeded as `checked_specs`."""
    return TensorTable.of(checked_specs(specs, deadline, "wanted"))


def check_retain(newest: object, domains: object, across: object, also: object) -> None:
    """Raise UsageError for what cannot be retained."""
    check_installed("also", also)
    if type(newest) is not int or not 0 <= newest <= RETAIN_MAX:
        raise UsageError(f"retain(newest={newest!r}): a count of versions from 0 to {RETAIN_MAX}")
    if type(domains) is not int or not 1 <= domains <= DOMAINS_MAX or across not in get_args(Across):
        raise UsageError(
            f"retain(domains={domains!r}, across={across!r}): from 1 to {DOMAINS_MAX}, across one of "
            f"{', '.join(get_args(Across))}"
        )


def here() -> Location:
    """Return our location: TENSORHUB_DATA_CENTER, TENSORHUB_RACK, TENSORHUB_HOST (default: the host's name)."""
    return Location(
        data_center=os.environ.get("TENSORHUB_DATA_CENTER", ""),
        rack=os.environ.get("TENSORHUB_RACK", ""),
        host=os.environ.get("TENSORHUB_HOST") or _host_name(),
    )


def _host_name() -> str:
    return printable(os.fsencode(socket.gethostname()).decode(errors="replace"))  # it may have any bytes


def located(location: object) -> Location:
    """Return the location with the id of this machine, or "" where its host was named explicitly, see Location."""
    place = check_location(location)
    return msgspec.structs.replace(place, machine=machine() if place.host == _host_name() else "")


def is_preemptible() -> bool:
    """Return whether the environment says that this node may be preempted at short notice."""
    said = os.environ.get(PREEMPTIBLE_VARIABLE, "0")
    if said not in ("0", "1"):
        raise UsageError(f"{PREEMPTIBLE_VARIABLE}={said!r:.80}: 1 on a node that may be taken away, else 0")
    return said == "1"


def check_written(slab: Slab, version: int) -> None:
    """Raise UsageError for an allocated slab some of whose tensors were never written."""
    if slab.kind == "allocated" and slab.unwritten:
        raise UsageError(
            f"{len(slab.unwritten)} tensors of the slab were never written, first {list(slab.unwritten[:5])}: write "
            "them all, or call mark_written for those that were filled through their views",
            version=version,
        )


def usable(
    names: Sequence[str], advertised: Advertised, limits: TransportLimits, gate: Gate | None
) -> dict[str, Transport]:
    """Make and return those of these transports that work on this host. Raise UsageError when none does."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"transports={names!r:.80}: a list of names, for example ['tcp']")
    transports: dict[str, Transport] = {}
    for name in names:
        reason = unavailable(name)
        if reason is None:
            try:
                host, ports = advertised
                transports[name] = create(name, advertise_host=host, ports=ports, limits=limits, gate=gate)
            except BaseException:
                for made in transports.values():
                    made.close()
                raise
        else:
            # With default transports a missing RDMA card is not worth a warning on every worker; one that exists and
            # is not used is.
            quiet = tuple(names) == DEFAULT_TRANSPORTS and not expected(name)
            log.log(logging.INFO if quiet else logging.WARNING, "no %s here: %s", name, reason)
    if not transports:
        raise UsageError(f"none of the transports {list(names)} works here: name another, for example tcp")
    return transports
