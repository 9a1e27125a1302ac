"""A replication told as a story: what happened goes in, and names for what happens often."""

from __future__ import annotations

from tensorhub_plugins.core import errors
from tensorhub_plugins.core.manifest import Manifest, TensorSpec, TensorTable
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.transfer import events, replication
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.types import CHECKPOINT, LATEST, Location

A, B, C = (letter.encode() * 16 for letter in "abc")
NAMES = {A: "a/0", B: "b/0", C: "c/0"}
RUNTIME = "runtime:f"
TIMEOUT_S = 60.0
LIMITS = TransferLimits()


def manifest(segments: int, tag: str = "") -> Manifest:
    tensors = (TensorSpec("w" + tag, "uint8", (segments,), segments),)
    return Manifest(TensorTable.of(tensors), bytes(16 * segments), 1)


def grant(shard: int, session: bytes, of: Manifest) -> m.Grant:
    return m.Grant(shard, session, NAMES[session], {"tcp": "tcp://x:1"}, Location(), of.root(), of.size_bytes)


def granted(request: int, *grants: m.Grant, version: int = 7, layout: str = CHECKPOINT, count: int = 1, claim=None):
    return events.Answer(request, m.Granted(request, version, layout, count, grants, claim))


class Story:
    """A machine, the current time, and shorthands for frequent events."""

    def __init__(self, version: int | str = 7, layouts: tuple[str, ...] = (CHECKPOINT,), **options: object) -> None:
        number = 0 if version == LATEST else version
        self.now = 0.0
        wanted = m.Acquire(0, number, 3, layouts, TIMEOUT_S, grows=bool(options.pop("grows", False)))
        self.machine = replication.Replication(wanted, TIMEOUT_S, TIMEOUT_S, **options)

    def at(self, now: float, event: events.Event) -> list[events.Effect]:
        """Return the effects of an event, once there is memory for what the machine wants to prepare."""
        self.now = now
        effects = self.machine.handle(event, now)
        if effects and isinstance(effects[-1], events.Prepare):
            key, of = effects[-1].key, effects[-1].manifest
            effects[-1:] = self.machine.handle(events.Prepared(key.shard, tuple(range(of.segment_count))), now)
        return effects

    def then(self, event: events.Event) -> list[events.Effect]:
        return self.at(self.now, event)

    def asks(self, effects: list[events.Effect]) -> m.Acquire:
        """Return the question that is the only effect."""
        (ask,) = effects
        assert isinstance(ask, events.AskSources)
        return ask.acquire

    def begin(self) -> None:
        self.asks(self.then(events.Begin()))

    def open(self, request: int, *pairs: tuple[bytes, Manifest]) -> None:
        """Go from Begin to every shard being read."""
        self.begin()
        grants = [grant(shard, session, of) for shard, (session, of) in enumerate(pairs)]
        self.then(granted(request, *grants, count=len(pairs)))
        for shard, (session, of) in enumerate(pairs):
            effects = self.then(events.Opened(shard, session, of))
            assert effects == [
                events.Read(shard, session, tuple(range(of.segment_count))[: LIMITS.window_first_segments])
            ]

    def arrive(self, shard: int, session: bytes, *segments: int) -> None:
        for segment in segments:
            effects = self.then(events.Arrived(shard, session, segment, True))
            state = self.machine.shards[shard]
            done = [] if state.missing else [events.ConfirmEpoch(shard, session)]
            assert effects == [events.Verified(shard, session, segment), *done]


def gives_up(effects: list[events.Effect]) -> errors.TensorHubError:
    assert isinstance(effects[-1], events.GiveUp)
    return effects[-1].error
