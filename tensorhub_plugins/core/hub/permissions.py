"""What each role may send to the hub, and how far it counts: one table. PURE.

A publisher decides for all. A reader reports on itself: it reads, and passes on what publishers have published, or what
it has made of that. It makes no version, takes none away from others, is no trainer, has influence on its own replica
only (`state.Worker.group`), and does not act for operators. An observer asks for the status (`tensorhub status`).

Everything that reaches the rest of the hub has passed `believed`. `standing` says how far a reader's report of a shard
counts, in every state of the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from tensorhub_plugins.core.hub.limits import LEASES_PER_SESSION_MAX
from tensorhub_plugins.core.hub.state import Version, Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE
from tensorhub_plugins.core.types import CHECKPOINT, Role, ShardKey

# all: it counts as it was sent. own: only what it says of its own worker counts, see `_own`. never: it is refused.
Right: TypeAlias = Literal["all", "own", "never"]

OF_READERS: Mapping[type[m.ClientMessage], Right] = {
    **dict.fromkeys((m.Hello, m.Heartbeat, m.Bye, m.Publish, m.Unpublish), "own"),
    **dict.fromkeys((m.Acquire, m.Release, m.Abandon, m.Wait, m.Target), "own"),
    **dict.fromkeys((m.AskVersions, m.AskStatus), "all"),
    **dict.fromkeys((m.Pin, m.Withdraw, m.Retain, m.Begin), "never"),
}
# How far messages of each kind count when a role sends them.
RIGHTS: Mapping[Role, Mapping[type[m.ClientMessage], Right]] = {
    "publisher": dict.fromkeys(OF_READERS, "all"),
    "reader": OF_READERS,
    "observer": {**dict.fromkeys(OF_READERS, "never"), m.AskStatus: "all"},
}

# What only publishers and operators decide, and the value that replaces it when a reader sends it.
DECIDED_BY_PUBLISHERS: Mapping[str, object] = {
    "retain_newest": None,
    "retain_domains": 1,
    "retain_across": "host",
    "retain_serial": 0,
    "retain_also": 0,
    "directive": NO_DIRECTIVE,
    "mark": b"",
}


def refusal(role: Role, message: m.ClientMessage, worker: Worker | None) -> str | None:
    """Return why this message is not carried out; None: it is. worker: the one whose session it names."""
    what = type(message).__name__
    if RIGHTS[role][type(message)] == "never":
        if role == "reader":
            return f"{what} was sent with a reader's key, which may not change what others read: use the run's secret"
        return (
            f"{what} was sent with an observer's key, which may ask for the status only: use a reader's or the secret"
        )
    if worker is not None and worker.role != role:
        return f"{what} was sent with a {role}'s key in the name of a {worker.role}"
    return None


def senseless(message: m.ClientMessage, worker: Worker | None) -> str | None:
    """Return why no role may ask for this; None where it may be asked for."""
    if not isinstance(message, m.Acquire):
        return None
    is_new = worker is not None and message.request_id > worker.last_request_id
    if is_new and worker is not None and len(worker.leases) >= LEASES_PER_SESSION_MAX:
        return f"{worker.name} has {LEASES_PER_SESSION_MAX} leases: end some of them"
    if not message.shards:
        return None
    if len(message.shards) > m.GRANTS_MAX:
        return f"{len(message.shards)} shards were asked for, and none may ask for more than {m.GRANTS_MAX} at once"
    if max(message.shards) >= message.shard_count:
        return f"shard {max(message.shards)} of {message.shard_count} was asked for: shards count from 0"
    if len(set(message.shards)) < len(message.shards):
        return "a shard was asked for twice: name each once"
    return None


def believed(role: Role, message: m.ClientMessage) -> m.ClientMessage:
    """Return the part that counts of this message, which is not refused."""
    return _own(message) if RIGHTS[role][type(message)] == "own" else message


def _own(message: m.ClientMessage) -> m.ClientMessage:
    match message:
        case m.Hello():
            holdings = tuple(map(_passed_on, message.holdings))
            return msgspec.structs.replace(message, holdings=holdings, **DECIDED_BY_PUBLISHERS)
        case m.Publish():
            return msgspec.structs.replace(message, holding=_passed_on(message.holding))
        case m.Release():
            return msgspec.structs.replace(message, refused=False)  # it makes no session expire sooner
        case _:  # it contains only what its own worker has, reads and wants
            return message


def _passed_on(holding: m.Holding) -> m.Holding:
    """Return the holding with its true origin: a reader has read its checkpoint, and made what it converted."""
    is_read = holding.key.layout == CHECKPOINT and holding.origin != "replicated"
    return msgspec.structs.replace(holding, origin="replicated") if is_read else holding


# counts: it holds the shard, and is read from. aside: kept, and without any effect, until a publisher has named the
# version and its bytes. refused: no publisher has published that.
Standing: TypeAlias = Literal["counts", "aside", "refused"]


def standing(role: Role, key: ShardKey, version: Version | None, *, recovering: bool, is_new: bool) -> Standing:
    """Return how far a worker's report that it holds this shard counts. version: as publishers have named it, if they
    have. recovering: the hub was started a moment ago, and publishers may still have to report. is_new: it has just
    received the shard (a Publish), and does not only repeat it (a Hello)."""
    if role != "reader":
        return "counts"
    at = key.layout, key.shard_count, key.shard
    if version is not None and version.was_visible and (key.layout != CHECKPOINT or at in version.contents):
        return "counts"
    return "aside" if recovering or not is_new else "refused"


def never_published(key: ShardKey) -> str:
    """Return the refusal that goes with `standing`."""
    return (
        f"a reader's key passes on what a publisher has published, and {key} is not that: publish with the run's secret"
    )
