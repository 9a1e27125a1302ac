"""What each role may ask of the hub. PURE.

A publisher may all. A reader may read, and pass on what it has read or converted: it cannot make a version, take one
away from others, or speak for operators. An observer may look (`tensorhub status`).
"""

from __future__ import annotations

import msgspec

from tensorhub_plugins.core.hub.state import Version, Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, Role, ShardKey

OF_READERS = (
    m.Hello,
    m.Heartbeat,
    m.Bye,
    m.AskStatus,
    m.AskVersions,
    m.Wait,
    m.Target,
    m.Acquire,
    m.Release,
    m.Abandon,
    m.Publish,  # see `cannot_be_passed_on`
    m.Unpublish,  # of what it holds itself
)


def refusal(role: Role, message: m.ClientMessage, worker: Worker | None) -> str | None:
    """Why this message is not carried out; None: it is. worker: whose session it names."""
    what = type(message).__name__
    if role == "observer" and not isinstance(message, m.AskStatus):
        return (
            f"{what} was sent with an observer's key, which may ask for the status only: use a reader's or the secret"
        )
    if role == "reader" and not isinstance(message, OF_READERS):
        return f"{what} was sent with a reader's key, which may not change what others read: use the run's secret"
    if worker is not None and worker.role != role:
        return f"{what} was sent with a {role}'s key in the name of a {worker.role}"
    return None


def as_reader(hello: m.Hello) -> m.Hello:
    """Without what only publishers and operators decide."""
    return msgspec.structs.replace(hello, retain_newest=None, directive=m.NO_DIRECTIVE, mark=b"")


def cannot_be_passed_on(key: ShardKey, version: Version | None, *, recovering: bool) -> str | None:
    """Why a reader cannot hold this shard; None: it can. recovering: the hub was started a moment ago, and who has
    published the version may still have to say so."""
    is_known = version is not None and version.was_visible
    if is_known and key.layout == CHECKPOINT:
        assert version is not None
        is_known = (key.layout, key.shard_count, key.shard) in version.contents
    if is_known or recovering:
        return None
    return (
        f"a reader's key passes on what a publisher has published, and {key} is not that: publish with the run's secret"
    )
